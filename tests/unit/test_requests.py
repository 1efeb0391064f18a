"""Two requests for one part: when there are two, which of them is written, what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from shardcache.errors import NotFoundError, OriginBusyError, OriginUnavailableError
from shardcache.fetch.bandwidth import Bandwidth
from shardcache.fetch.bid import Bid
from shardcache.fetch.hedging import Hedging
from shardcache.fetch.requests import Part, Requests
from shardcache.fetch.slots import Claim, Slots
from shardcache.metrics import Counters
from shardcache.origin.base import Flow, Received, RemoteObject, stream_ranges

STORE = "s3://bucket"
OBJ = RemoteObject(f"{STORE}/a.tar", "1", 100)
Read = Callable[[memoryview, Flow], Awaitable[None]]


class Script:
    """An origin that answers one read after the other as it was told."""

    def __init__(self, *reads: Read) -> None:
        self.reads = list(reads)
        self.begun = 0

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`."""
        return OBJ

    async def read_into(self, obj: RemoteObject, start: int, buffer: memoryview, flow: Flow) -> None:
        """As `Origin.read_into`."""
        self.begun += 1
        await self.reads.pop(0)(buffer, flow)

    def stream(self, obj: RemoteObject, buffer: memoryview, flow: Flow) -> AsyncGenerator[memoryview, None]:
        """As `Origin.stream`."""
        return stream_ranges(self, obj, buffer, flow)

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        return []

    async def close(self) -> None:
        """As `Origin.close`."""


async def answers(buffer: memoryview, flow: Flow) -> None:
    """Give the right bytes."""
    buffer[:] = b"r" * len(buffer)
    flow.received(len(buffer))


async def hangs(buffer: memoryview, flow: Flow) -> None:
    """Give forty bytes, and spoil what it has of the buffer when it is ended."""
    flow.received(40)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        buffer[:] = b"w" * len(buffer)


async def fails(buffer: memoryview, flow: Flow) -> None:
    """Find nothing."""
    raise NotFoundError("gone", url=OBJ.url)


class Desk:
    """Requests over a script, with what they know, and the parts that they wrote."""

    def __init__(self, *reads: Read, slots: int = 4, seen: int = 200, stall_timeout_s: float = 60.0) -> None:
        self.origin = Script(*reads)
        self.slots = Slots(slots)
        self.hedging = Hedging(share=0.02)
        for _ in range(seen):
            self.hedging.took(STORE, OBJ.size_bytes, 0.001)
        self.counters = Counters()
        self.requests = Requests(self.slots, Bandwidth(None), self.hedging, self.counters, stall_timeout_s)
        self.written: list[bytes] = []

    async def fetch(self) -> None:
        """Fetch the only part."""
        claim = Claim(lambda: Bid(2), STORE)
        await self.requests.fetch(Part(self.origin, OBJ, 0, 100, 100, claim, self._write, lambda tap: None))

    async def _write(self, data: memoryview) -> None:
        self.written.append(bytes(data))


async def test_a_late_part_is_asked_for_again_and_the_first_answer_is_written() -> None:
    """Once, from memory that the other request never had; its bytes are counted as given away."""
    desk = Desk(hangs, answers)
    await desk.fetch()
    assert desk.written == [b"r" * 100]
    assert desk.counters == Counters(origin_bytes=140, origin_requests=2, hedges=1, hedged_bytes=40)


async def test_a_part_that_comes_in_time_is_asked_for_once() -> None:
    """Nothing is given away."""
    desk = Desk(answers)
    await desk.fetch()
    assert desk.written == [b"r" * 100]
    assert desk.counters == Counters(origin_bytes=100, origin_requests=1)


async def test_the_first_request_may_still_win() -> None:
    """Then the second is the one that was not needed."""
    second_begun = asyncio.Event()

    async def late(buffer: memoryview, flow: Flow) -> None:
        await second_begun.wait()
        await answers(buffer, flow)

    async def second(buffer: memoryview, flow: Flow) -> None:
        second_begun.set()
        await hangs(buffer, flow)

    desk = Desk(late, second)
    await desk.fetch()
    assert desk.written == [b"r" * 100]
    assert (desk.counters.hedges, desk.counters.hedged_bytes) == (1, 40)


async def test_a_second_request_that_fails_says_nothing() -> None:
    """The first one's answer is taken when it comes."""
    second_failed = asyncio.Event()

    async def late(buffer: memoryview, flow: Flow) -> None:
        await second_failed.wait()
        await answers(buffer, flow)

    async def second(buffer: memoryview, flow: Flow) -> None:
        second_failed.set()
        await fails(buffer, flow)

    desk = Desk(late, second)
    await desk.fetch()
    assert desk.written == [b"r" * 100]


async def test_a_throttled_store_is_not_asked_twice() -> None:
    """Where 503 lowered the limit, a late part waits for its time to be over."""
    desk = Desk(hangs, answers, stall_timeout_s=0.5)
    with pytest.raises(OriginBusyError):
        async with desk.slots.hold(Claim(lambda: Bid(2), STORE)):
            raise OriginBusyError("too busy")
    with pytest.raises(OriginUnavailableError, match="only 40 bytes"):
        await desk.fetch()
    assert (desk.origin.begun, desk.counters.hedges) == (1, 0)


async def test_what_was_not_earned_is_not_asked_for() -> None:
    """With two hedges' worth of parts seen, a third late part waits."""
    desk = Desk(hangs, answers, hangs, answers, hangs, seen=101, stall_timeout_s=0.5)
    await desk.fetch()
    await desk.fetch()
    with pytest.raises(OriginUnavailableError):
        await desk.fetch()
    assert (desk.counters.hedges, len(desk.written)) == (2, 2)


async def test_a_second_request_waits_for_a_slot_like_any_other() -> None:
    """With one connection there is none for it, whatever the first takes."""
    desk = Desk(hangs, answers, slots=1, stall_timeout_s=0.5)
    with pytest.raises(OriginUnavailableError):
        await desk.fetch()
    assert (desk.origin.begun, desk.counters.hedges) == (1, 0)


async def test_slots_are_free_after_every_race() -> None:
    """Neither the winner's nor the loser's stays behind."""
    desk = Desk(hangs, answers, answers, hangs, answers)
    for _ in range(3):
        await desk.fetch()
    assert repr(desk.slots) == "<Slots 0 of 4 held, 0 queued>"
