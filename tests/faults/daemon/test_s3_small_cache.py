"""Ranges that S3 clients read at the same time, in a cache that holds few of them."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.network.http_requests import Answer
from support.programs.daemon import Daemon, eventually
from support.programs.s3_door import DOOR, ask, keys_of, signed
from support.stores.faulty_s3 import FaultyS3

MIB = 1024 * 1024
CONTENT = random.Random(8).randbytes(16 * MIB)
RANGE_BYTES = 3 * MIB
STARTS = (0, 4 * MIB, 8 * MIB, 12 * MIB)
CAPACITY = "11MB"  # three of these ranges


@contextmanager
def ending(daemon: Daemon) -> Iterator[None]:
    """Kill a daemon at the end, which is started in a thread: its store runs in this one."""
    try:
        yield
    finally:
        daemon.kill()


def read(daemon: Daemon, keys: dict[str, Any], start: int) -> Answer:
    """Read one of the ranges."""
    span = f"bytes={start}-{start + RANGE_BYTES - 1}"
    return ask(daemon, *signed(daemon, "/faulty/large", keys, Range=span))


async def test_a_range_waits_for_space_of_arriving_ranges(faulty: FaultyS3, tmp_path: Path) -> None:
    """A slow store keeps three ranges from arriving; the fourth has space later."""
    faulty.put("large", CONTENT)
    faulty.hold("large", times=1000)
    daemon = Daemon(tmp_path, *DOOR, capacity=CAPACITY, env=faulty.env())

    def all_wait() -> bool:
        return [transfer["waiters"] for transfer in daemon.status()["transfers"]] == [len(STARTS)]

    def start_read(start: int) -> asyncio.Task[Answer]:
        return asyncio.create_task(asyncio.to_thread(read, daemon, keys, start))

    with ending(daemon):
        await asyncio.to_thread(daemon.start)
        keys = await asyncio.to_thread(keys_of, daemon)
        reading = [start_read(start) for start in STARTS]
        waiting = asyncio.create_task(asyncio.to_thread(eventually, all_wait))
        # If a range that has no space is an error, that comes before all of them wait.
        await asyncio.wait([waiting, *reading], return_when=asyncio.FIRST_COMPLETED)
        faulty.answer_late()
        answers = await asyncio.gather(*reading)
        assert [answer.status for answer in answers] == [206] * len(STARTS)
        for start, answer in zip(STARTS, answers, strict=True):
            assert answer.body == CONTENT[start : start + RANGE_BYTES]
        await waiting
