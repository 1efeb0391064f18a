"""The daemon is killed (SIGKILL) at each call by which it changes a file, one life for each call, and started again.

Published shards must be intact and served without being fetched again, finished parts be used, `used_bytes` agree with
the disk, and nothing lie about that nobody counts. Readers are killed at random, with leases in hand.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from campaign.harness import Result, Row, scaled
from campaign.lives import AMPLE, FLAGS, NEEDS_CC, WRITES, Death, Ground, Life, Source, Story, die_and_recover, ground
from support.disks.shim import Action, read_log
from support.programs.daemon import Daemon, eventually

__all__ = ["ROWS", "ground"]

_AT_ONCE = 3
_READERS_AT_ONCE = 4
_READER = """
import random, sys
from pathlib import Path
from support.programs.raw_session import RawSession

rng = random.Random(sys.argv[2])
with RawSession(Path(sys.argv[1]), job="mortal") as session:
    reads = [rng.randrange(len(sys.argv) - 3) for _ in range(100_000)]
    session.plan(sys.argv[3:], reads)
    held = []
    for position in range(len(reads)):
        held.append(session.take(position)["lease"])
        if position == 0:
            print("reading", flush=True)
        if len(held) > rng.randrange(1, 4):
            session.send(type="release", lease=held.pop(rng.randrange(len(held))))
"""


def killed(name: str, field: Ground, result: Result, scale: float) -> None:
    """Kill a daemon before each of its calls at scale 1, at every n-th below, and in the middle of each write."""
    story = field.stories[name]
    with tempfile.TemporaryDirectory(dir=field.folder) as folder:
        life = Life(field.zygote, story, Path(folder, "count"))
        life.shim.log_to(Path(folder, "log"))
        life.live(Death(Action.COUNT, 0))
        writes = sum(call.op in WRITES for call in read_log(Path(folder, "log")))
    step = round(story.stride / scale)
    _kill(field, story, result, [Death(Action.KILL_BEFORE, at) for at in _points(life.shim.seen, step)])
    _kill(field, story, result, [Death(Action.KILL_HALF, at) for at in _points(writes, step)])


def _points(count: int, step: int) -> range:
    """Return every so many-th of as many points, or the one in the middle where they are fewer."""
    return range(1, count + 1, step) if step < count else range(count // 2, count // 2 + 1)


def killed_twice(field: Ground, result: Result, scale: float) -> None:
    """Kill a daemon, and the next one while it recovers."""
    rng = random.Random(0)
    count = scaled(120, scale)
    deaths = [Death(Action.KILL_AFTER, rng.randrange(60, 300), rng.randrange(1, 200)) for _ in range(count)]
    _kill(field, field.stories["fetch"], result, deaths)


def _kill(field: Ground, story: Story, result: Result, deaths: list[Death]) -> None:
    with tempfile.TemporaryDirectory(dir=field.folder) as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        live: Callable[[Death, Path], None] = partial(_live, field, story, result)
        list(pool.map(live, deaths, (Path(folder, str(number)) for number in range(len(deaths)))))


def _live(field: Ground, story: Story, result: Result, death: Death, root: Path) -> None:
    die_and_recover(field.zygote, story, death, root, result)


def killed_readers(field: Ground, result: Result, scale: float) -> None:
    """Kill readers, a few at a time; their sessions, leases and plans must end with them."""
    source, rng, folder = field.stories["fetch"].source, random.Random(0), field.folder / "readers"
    folder.mkdir()
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=source.env, spawn=field.zygote.spawn) as daemon:
        while result.injected < scaled(200, scale):
            readers = [_start_reader(daemon, source, rng.random()) for _ in range(_READERS_AT_ONCE)]
            for reader in readers:
                assert reader.stdout and reader.stdout.readline() == b"reading\n"
            rng.shuffle(readers)
            time.sleep(rng.random() * 0.2)  # somewhere in their work
            for reader in readers:
                reader.kill()
                result.injected += 1
            begun_s = time.monotonic()
            for reader in readers:
                reader.communicate()
            try:
                eventually(lambda: daemon.sessions() == 0 and daemon.leases() == 0)
                result.recovery_s.append(time.monotonic() - begun_s)
            except TimeoutError:
                result.fail("hangs", f"leases outlive their readers: {daemon.status()['jobs']}")
        if "Traceback" in daemon.log.read_text():
            result.fail("untyped", f"a bug shows in the log: {daemon.tail()}")


def _start_reader(daemon: Daemon, source: Source, seed: float) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = (sys.executable, "-c", _READER, str(daemon.socket), str(seed), *source.tars)
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


_STORIES = ("first start", "take over", "pin", "fetch", "fetch from S3", "resume and evict", "verify, evict, count")
_QUICK = ("fetch from S3", "verify, evict, count")

ROWS = (
    *(Row(f"SIGKILL: {name}", partial(killed, name), name not in _QUICK, NEEDS_CC) for name in _STORIES),
    Row("SIGKILL, and again while it recovers", killed_twice, skip=NEEDS_CC),
    Row("SIGKILL: readers with leases", killed_readers, skip=NEEDS_CC),
)
