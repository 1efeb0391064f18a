"""Reading processes are killed (SIGKILL) at random, with leases in hand and requests under way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from campaign.kills.life import AMPLE, FLAGS, Source
from campaign.result import Result
from support.programs.daemon import Daemon, eventually
from support.programs.zygote import Zygote

_AT_ONCE = 4


def kill_readers(zygote: Zygote, source: Source, folder: Path, count: int) -> Result:
    """Kill so many readers, a few at a time; their sessions, leases and plans must end with them."""
    result = Result("kills", "SIGKILL: readers with leases")
    rng = random.Random(0)
    folder.mkdir()
    with Daemon(folder, *FLAGS, capacity=AMPLE, env=source.env, spawn=zygote.spawn) as daemon:
        while result.injected < count:
            readers = [_start(daemon, source, rng.random()) for _ in range(_AT_ONCE)]
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
    return result


def _start(daemon: Daemon, source: Source, seed: float) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = (sys.executable, "-m", "campaign.kills.reader", str(daemon.socket), str(seed), *source.tars)
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
