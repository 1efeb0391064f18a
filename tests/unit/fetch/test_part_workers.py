"""Probing: the beginning of a download."""

from __future__ import annotations

import asyncio

from shardcache.fetch.parts.part_workers import PartWorkers
from support.programs.still_loop import StillLoop, pass_time, turns


class Parts:
    """Parts that arrive when they are told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._arrivals: dict[int, asyncio.Future[None]] = {}

    async def fetch(self, index: int) -> None:
        """Ask for a part and wait for it."""
        self.asked.append(index)
        self._arrivals[index] = asyncio.get_running_loop().create_future()
        await self._arrivals[index]

    async def arrive(self, index: int) -> None:
        """Let a part arrive, and whatever follows from that happen."""
        self._arrivals[index].set_result(None)
        await turns()


async def test_one_more_for_each_part_that_arrives() -> None:
    """The first part has the line to itself; in the end there are as many at once as there may be, in order."""
    parts = Parts()
    running = asyncio.create_task(PartWorkers(4, iter(range(9)), parts.fetch, patience_s=1e6).run(1))
    await turns()
    for arriving, asked in ((0, 1), (1, 3), (2, 5), (3, 7), (4, 8), (5, 9)):
        assert parts.asked == list(range(asked))
        await parts.arrive(arriving)
    for arriving in (6, 7, 8):
        await parts.arrive(arriving)
    await running


def test_a_first_part_that_does_not_come_keeps_nobody_waiting() -> None:
    """Each time that for a while none arrived, there are twice as many; not all at once, which would make all late."""

    async def read() -> None:
        parts = Parts()
        running = asyncio.create_task(PartWorkers(8, iter(range(8)), parts.fetch, patience_s=1.0).run(1))
        await turns()
        for asked in (1, 2, 4, 8):
            assert parts.asked == list(range(asked))
            pass_time(1.1)
            await turns()
        for index in range(8):
            await parts.arrive(index)
        await running

    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(read())


async def test_all_at_once_where_nobody_waits() -> None:
    """Without anyone to please, every connection is used from the beginning."""
    parts = Parts()
    running = asyncio.create_task(PartWorkers(3, iter(range(4)), parts.fetch, patience_s=1e6).run(3))
    await turns()
    assert parts.asked == [0, 1, 2]
    for index in range(4):
        await parts.arrive(index)
    await running
