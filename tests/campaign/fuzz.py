"""Hostile input: what reads bytes from elsewhere, given more than a million of them, most guided by coverage."""

import asyncio
import contextlib
import importlib.util
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from campaign import api
from campaign.fuzz_sessions import Wire
from campaign.fuzz_targets import FOLDER, TARGETS, kept, lines
from campaign.harness import Result, Row, scaled
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

# Inputs at scale 1, and the seconds they may take.
_RUNS = {
    "session": (15_000, 240),
    "arriving": (80_000, 120),
    "sidecar": (120_000, 120),
    "answers": (40_000, 120),
    "tar": (350_000, 240),
    "message": (900_000, 300),
}
_LEAST_RUNS = 150
_SESSIONS = 2_000
_EXAMPLES = 150
_MOST_BYTES = 8192
_HANG_S = 30
_MEMORY_MB = 2048
# libFuzzer looks at its limits between two inputs; this is for when it does not come back.
_GRACE_S = 120
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Ground:
    """A daemon that may fetch nothing but some shards, and a folder for inputs."""

    daemon: Daemon
    urls: list[str]
    folder: Path


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    urls = [f"file://{path}" for path in write_shards(folder, 3, 3)]
    with Daemon(folder, "--allow", f"file://{folder}/", "--log-level", "warning") as daemon:
        yield Ground(daemon, urls, folder)


def guided(name: str, ground: Ground, result: Result, scale: float) -> None:
    """Run libFuzzer as a program on a target, and read what it reports in the end; it stops at the first failure."""
    full, most_s = _RUNS[name]
    corpus, log = ground.folder / name, ground.folder / f"{name}.log"
    corpus.mkdir()
    command = [sys.executable, "-m", "campaign.libfuzzer", name, str(corpus), *_kept(name)]
    command += [f"-runs={scaled(full, scale, _LEAST_RUNS)}", f"-max_total_time={most_s}", f"-timeout={_HANG_S}"]
    command += [f"-rss_limit_mb={_MEMORY_MB}", "-seed=1", f"-max_len={_MOST_BYTES}", "-print_final_stats=1"]
    command += [f"-artifact_prefix={ground.folder}/{name}-"]
    env = os.environ | {"PYTHONPATH": str(FOLDER.parent), "TMPDIR": str(ground.folder)}
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, timeout=most_s + _GRACE_S, check=False
            )
        except subprocess.TimeoutExpired:
            result.fail("hangs", log.read_text(errors="replace")[-4000:])
            return
    report = log.read_text(errors="replace")
    if counted := re.search(r"stat::number_of_executed_units: (\d+)", report):
        result.injected = int(counted[1])
    broken = re.search(rf"{name}-(crash|timeout|oom)-", report)
    if broken or done.returncode:
        hung = (broken and broken[1] == "timeout") or "\nTimeoutError" in report  # libFuzzer's limit, or a target's own
        result.fail("hangs" if hung else "wrong" if "AssertionError" in report else "untyped", report[-4000:])


def _kept(name: str) -> list[str]:
    return [str(FOLDER / kind / name) for kind in ("corpus", "found") if kept(kind, name)]


def hostile_sessions(ground: Ground, result: Result, scale: float) -> None:
    """Play hostile sessions, some at a time, while another reads all shards again and again.

    That one must not be disturbed, the daemon survive, and nothing be left behind.
    """
    daemon, todo = ground.daemon, _hostile(ground.urls, scaled(_SESSIONS, scale, 60))
    try:
        with RawSession(daemon, job="honest") as honest:
            honest.plan(ground.urls, list(range(len(ground.urls))))
            while batch := [data for _, data in zip(range(_AT_ONCE), todo, strict=False)]:
                asyncio.run(_play(daemon, batch))
                result.injected += len(batch)
                for position, url in enumerate(ground.urls):
                    granted = honest.take(position)
                    assert (granted["type"], granted.get("url")) == ("leased", url), granted
                    honest.send(type="release", lease=granted["lease"])
            honest.settle()
        eventually(lambda: daemon.leases() == 0 and daemon.sessions() == 0)
        log = daemon.log.read_text(errors="replace")
        assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
    except AssertionError as exn:
        result.fail("wrong", str(exn))
    except TimeoutError as exn:
        result.fail("hangs", str(exn))


def _hostile(urls: list[str], sessions: int) -> Iterator[bytes]:
    """Yield what so many sessions send: the kept ones first, then changed ones."""
    rng = random.Random(0)
    seeds = [path.read_bytes() for kind in ("corpus", "found") for path in kept(kind, "session")]
    for number in range(sessions):
        data = seeds[number] if number < len(seeds) else rng.choice(seeds)
        for _ in range(0 if number < len(seeds) else rng.randrange(1, 4)):
            data = lines(data, _MOST_BYTES, rng.getrandbits(32), lambda data, most: _flip(data, most, rng))
        for place, url in enumerate(urls):
            data = data.replace(b"@%d" % place, url.encode())
        yield data


def _flip(data: bytes, most_bytes: int, rng: random.Random) -> bytes:
    changed = bytearray(data or b"?")
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[:most_bytes])


async def _play(daemon: Daemon, batch: list[bytes]) -> None:
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
        for data in batch:
            group.create_task(_one(daemon, data))


async def _one(daemon: Daemon, data: bytes) -> None:
    wire = await Wire.open(daemon.socket)
    with contextlib.suppress(ConnectionError):
        await wire.say_all(data)
    await wire.close()


def any_request(ground: Ground, result: Result, scale: float) -> None:
    """Call the admin API with what it describes, and with what it does not."""
    for key in api.OPERATIONS:
        try:
            result.injected += sum(1 for _ in api.examine(ground.daemon, key, scaled(_EXAMPLES, scale, 2)))
        except AssertionError as exn:
            result.fail("wrong", f"{key}: {exn}")


_NEEDS_ATHERIS = "" if importlib.util.find_spec("atheris") else "atheris is for Linux alone"

ROWS = (
    *(Row(TARGETS[name].what, partial(guided, name), slow=True, skip=_NEEDS_ATHERIS) for name in _RUNS),
    Row("hostile sessions beside a reader", hostile_sessions),
    Row("any request to the admin API", any_request),
)
