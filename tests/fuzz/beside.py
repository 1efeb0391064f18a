"""Hostile sessions beside an honest reader's, on one daemon."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator

from fuzz import mutators
from fuzz.sessions import Wire
from fuzz.targets import kept
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession

AT_ONCE = 8
_MOST_BYTES = 8192


def hostile(urls: list[str], sessions: int, seed: int) -> Iterator[bytes]:
    """Yield what so many sessions send: the kept ones first, then changed ones."""
    rng = random.Random(seed)
    seeds = [path.read_bytes() for kind in ("corpus", "found") for path in kept(kind, "session")]
    for number in range(sessions):
        data = seeds[number] if number < len(seeds) else rng.choice(seeds)
        for _ in range(0 if number < len(seeds) else rng.randrange(1, 4)):
            data = mutators.lines(data, _MOST_BYTES, rng.getrandbits(32), lambda data, most: _flip(data, most, rng))
        for place, url in enumerate(urls):
            data = data.replace(b"@%d" % place, url.encode())
        yield data


def _flip(data: bytes, most_bytes: int, rng: random.Random) -> bytes:
    changed = bytearray(data or b"?")
    for _ in range(rng.randrange(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed[:most_bytes])


def play(daemon: Daemon, urls: list[str], sessions: int, seed: int = 0) -> int:
    """Play hostile sessions, some at a time, while another reads all shards again and again; return how many.

    Raises AssertionError when that one is disturbed, the daemon does not survive, or something is left behind.
    """
    with RawSession(daemon, job="honest") as honest:
        honest.plan(urls, list(range(len(urls))))
        played, todo = 0, hostile(urls, sessions, seed)
        while batch := [data for _, data in zip(range(AT_ONCE), todo, strict=False)]:
            asyncio.run(_play(daemon, batch))
            played += len(batch)
            for position, url in enumerate(urls):
                granted = honest.take(position)
                assert (granted["type"], granted.get("url")) == ("leased", url), granted
                honest.send(type="release", lease=granted["lease"])
        honest.settle()
    eventually(lambda: daemon.leases() == 0 and daemon.sessions() == 0)
    log = daemon.log.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
    return played


async def _play(daemon: Daemon, batch: list[bytes]) -> None:
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
        for data in batch:
            group.create_task(_one(daemon, data))


async def _one(daemon: Daemon, data: bytes) -> None:
    wire = await Wire.open(daemon.socket)
    with contextlib.suppress(ConnectionError):
        await wire.say_all(data)
    await wire.close()
