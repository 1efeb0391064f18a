"""Readers are killed or stopped, with leases in hand."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from campaign.harness import Result, scaled
from campaign.kill_audit import Source
from campaign.kill_stories import fetch
from campaign.lives import AMPLE, FLAGS, Ground
from support.programs.daemon import Daemon, eventually

_AT_ONCE = 4
_PROGRAM = """
import random, sys, zlib
from pathlib import Path
from support.programs.raw_session import RawSession

rng = random.Random(sys.argv[2])
with RawSession(Path(sys.argv[1]), job="mortal") as session:
    reads = [rng.randrange(len(sys.argv) - 3) for _ in range(100_000)]
    session.plan(sys.argv[3:], reads)
    held = []
    for position, number in enumerate(reads):
        held.append((number, session.take(position)))
        if len(held) > rng.randrange(1, 4):
            number, lease = held.pop(rng.randrange(len(held)))
            print(number, zlib.crc32(Path(lease["path"]).read_bytes()), flush=True)
            session.send(type="release", lease=lease["lease"])
"""

Reader = subprocess.Popen[bytes]


def killed_readers(freeze: bool, field: Ground, result: Result, scale: float) -> None:
    """Kill readers, a few at a time; their sessions, leases and plans must end with them.

    Args:
        freeze: stop all of them before, and let all but one go on.
    """
    source = field.stories["fetch"].source
    rng = random.Random(0)
    folder = Path(tempfile.mkdtemp(dir=field.folder))
    spawn = field.zygote.spawn
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=source.env, spawn=spawn) as daemon:
        while result.injected < scaled(200, scale):
            readers = [_start(daemon, source, rng.random()) for _ in range(_AT_ONCE)]
            for reader in readers:
                _hear(reader, source, rng.randrange(1, 100), result)
            rng.shuffle(readers)
            if freeze:
                _freeze(readers, daemon, source, result)
            for reader in readers:
                reader.kill()
                result.injected += 1
            _await_end(readers, daemon, result)
        if "Traceback" in daemon.log.read_text():
            result.fail("untyped", f"a bug shows in the log: {daemon.tail()}")


def _await_end(readers: list[Reader], daemon: Daemon, result: Result) -> None:
    """Wait until nothing is left of killed readers."""
    begun_s = time.monotonic()
    for reader in readers:
        reader.communicate()
    try:
        eventually(lambda: daemon.sessions() == 0 and daemon.leases() == 0)
        result.recovery_s.append(time.monotonic() - begun_s)
    except TimeoutError:
        result.fail("hangs", f"leases outlive their readers: {daemon.status()['jobs']}")


def _hear(reader: Reader, source: Source, count: int, result: Result) -> None:
    """Have a reader read so many shards, and compare them."""
    sums = [zlib.crc32(tar) for tar in source.tars.values()]
    for _ in range(count):
        assert reader.stdout is not None
        number, found = map(int, reader.stdout.readline().split())
        if found != sums[number]:
            result.fail("wrong", f"a reader got other bytes for shard {number}")


def _freeze(readers: list[Reader], daemon: Daemon, source: Source, result: Result) -> None:
    """Stop readers, read everything meanwhile, and let all but the first go on."""
    for reader in readers:
        reader.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
    fetch(daemon, source)
    if daemon.leases() < len(readers):
        result.fail("lost", f"stopped readers have lost their leases: {daemon.shards()}")
    for reader in readers[1:]:
        assert reader.stdout is not None
        os.set_blocking(reader.stdout.fileno(), False)
        reader.stdout.read()  # what it had printed before
        os.set_blocking(reader.stdout.fileno(), True)
        reader.send_signal(signal.SIGCONT)
        _hear(reader, source, 20, result)


def _start(daemon: Daemon, source: Source, seed: float) -> Reader:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = (sys.executable, "-c", _PROGRAM, str(daemon.socket), str(seed), *source.tars)
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
