"""Two requests for one part: the written one and the counts, on a clock that leaps."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shardcache.errors import NotFoundError, OriginBusyError, OriginUnavailableError
from shardcache.fetch.limits.bandwidth import Bandwidth
from shardcache.fetch.limits.scheduler import Scheduler
from shardcache.fetch.limits.slot_claims import Claim, Priority
from shardcache.fetch.race import race
from shardcache.fetch.requests import Requests, RequestSpan
from shardcache.fetch.tier.tier_requests import TierFirst
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.telemetry.metrics import Counters
from shardcache.transport.between.flow import Commit, Flow
from shardcache.transport.between.parts import Parts, PartSums
from support.programs.still_loop import leaping, pass_time, still, turns

STORE = "s3://bucket"
OBJ = RemoteObject(f"{STORE}/a.tar", "1", 100)
PARTS = Parts("/nowhere/a.part", None, 100, 0, 100)
Read = Callable[[Flow], Awaitable[None]]


class Script(Origin):
    """An origin that answers one read after the other as it was told."""

    def __init__(self, *reads: Read) -> None:
        self.reads = list(reads)
        self.begun = 0
        self.ended: list[object] = []
        self.write_error: Exception | None = None

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        number = self.begun
        self.begun = self.begun + 1
        try:
            await self.reads.pop(0)(flow)
            if commit is not None and not await commit():
                return None
            if self.write_error is not None:
                raise self.write_error
            self.ended.append("written")
            return [PartSums(0, number, 0)]
        finally:
            self.ended.append(number)


async def answers(flow: Flow) -> None:
    """Give the right bytes."""
    flow.received(100)


async def hangs(flow: Flow) -> None:
    """Give forty bytes, and no more."""
    flow.received(40)
    await asyncio.get_running_loop().create_future()


async def fails(flow: Flow) -> None:
    """Find nothing."""
    raise NotFoundError("gone", url=OBJ.url)


class Desk:
    """Requests over a script, with what they know."""

    def __init__(self, *reads: Read, slots: int = 4, seen: int = 200) -> None:
        self.origin = Script(*reads)
        self.slots = Scheduler(slots, hedged_share=0.02)
        for _ in range(seen):
            self.slots.origin(STORE).hedging.record_time(OBJ.size_bytes, 0.001)
        self.counters = Counters()
        requests = Requests(self.slots, Bandwidth(None), self.counters, 60.0)
        self.requests = TierFirst(requests, self.slots, self.counters, 60.0)

    async def fetch(self) -> int:
        """Fetch the only part, and return the number of the request that wrote it."""
        claim = Claim(lambda: Priority(2), STORE)
        (sums,) = await self.requests.fetch(
            RequestSpan(self.origin, OBJ, PARTS, claim, lambda pausable_read: None)
        )
        return sums.crc32c


@leaping
async def test_a_late_part_is_asked_for_again_and_the_first_answer_is_written() -> None:
    """Once, after the other request has ended; the bytes of that are counted as given away."""
    desk = Desk(hangs, answers)
    assert await desk.fetch() == 1
    assert desk.origin.ended == [0, "written", 1]
    assert desk.counters == Counters(origin_bytes=140, origin_requests=2, hedges=1, hedged_bytes=40)
    assert repr(desk.slots) == "<Scheduler 0 of 4 held, 0 queued>"


@still
async def test_parts_are_requested_once_on_a_saturated_link() -> None:
    """All are as slow as one another; only what hangs while the others go on is asked for again."""
    flows: list[Flow] = []
    ends = [asyncio.get_running_loop().create_future() for _ in range(3)]

    async def slow(flow: Flow) -> None:
        flows.append(flow)
        flow.received(40)
        await ends[len(flows) - 1]
        flow.received(60)

    desk = Desk(slow, slow, slow, answers)
    tasks = [asyncio.create_task(desk.fetch()) for _ in ends]
    await turns()
    pass_time(0.06)  # late, by what was seen of the store
    await turns()
    assert desk.counters.hedges == 0
    for _ in range(4):
        for flow in flows[:2]:
            flow.received(10)
        pass_time(0.02)
        await turns()
    assert desk.counters.hedges == 1
    for end in ends[:2]:
        end.set_result(None)
    await asyncio.gather(*tasks)
    assert desk.origin.ended.count("written") == 3
    assert desk.counters.hedged_bytes == 40


@leaping
@pytest.mark.parametrize(("outcome", "hedged_bytes"), [(hangs, 40), (fails, 0)])
async def test_the_first_request_may_still_win(outcome: Read, hedged_bytes: int) -> None:
    """Then the second is the one that was not needed, whether it hangs or has failed."""
    second_begun = asyncio.Event()

    async def late(flow: Flow) -> None:
        await second_begun.wait()
        await answers(flow)

    async def second(flow: Flow) -> None:
        second_begun.set()
        await outcome(flow)

    desk = Desk(late, second)
    assert await desk.fetch() == 0
    assert desk.origin.ended.count("written") == 1
    assert desk.counters.hedges == 1
    assert desk.counters.hedged_bytes == hedged_bytes
    assert repr(desk.slots) == "<Scheduler 0 of 4 held, 0 queued>"


@leaping
async def test_a_throttled_store_is_not_asked_twice() -> None:
    """After a 503 lowered the limit, a late part is not hedged, but waits for its own time-out."""
    desk = Desk(hangs, answers)
    with pytest.raises(OriginBusyError):
        async with desk.slots.hold(Claim(lambda: Priority(2), STORE)):
            raise OriginBusyError("too busy")
    with pytest.raises(OriginUnavailableError, match="only 40 bytes"):
        await desk.fetch()
    assert desk.origin.begun == 1
    assert desk.counters.hedges == 0


@leaping
async def test_hedges_beyond_the_share_are_not_sent() -> None:
    """With two hedges' worth of parts seen, a third late part waits."""
    desk = Desk(hangs, answers, hangs, answers, hangs, seen=101)
    await desk.fetch()
    await desk.fetch()
    with pytest.raises(OriginUnavailableError):
        await desk.fetch()
    assert desk.counters.hedges == 2
    assert desk.origin.ended.count("written") == 2


@leaping
async def test_a_second_request_waits_for_a_slot_like_any_other() -> None:
    """With one connection there is none for it, whatever the first takes."""
    desk = Desk(hangs, answers, slots=1)
    with pytest.raises(OriginUnavailableError):
        await desk.fetch()
    assert desk.origin.begun == 1
    assert desk.counters.hedges == 0


@leaping
async def test_a_second_request_that_fails_after_the_first_was_ended_is_an_error() -> None:
    """Nothing is left that could still come, so the part has to be tried again."""
    desk = Desk(hangs, answers)
    desk.origin.write_error = OriginUnavailableError("the transport worker was killed")
    with pytest.raises(OriginUnavailableError, match="killed"):
        await desk.fetch()
    assert desk.origin.ended == [0, 1]


class Rivals:
    """Two requests that end when they are told to, and note what became of them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first_answer: asyncio.Future[None] = loop.create_future()
        self.second_answer: asyncio.Future[None] = loop.create_future()
        self.told: list[str] = []

    async def first(self) -> str:
        """Read and write."""
        try:
            await self.first_answer
            return "first"
        except asyncio.CancelledError:
            self.told.append("first cancelled")
            raise

    async def second(self, end_first: Callable[[], Awaitable[bool]]) -> str:
        """Read, and write if it is not too late."""
        try:
            await self.second_answer
        except asyncio.CancelledError:
            self.told.append("second cancelled")
            raise
        self.told.append("second writes" if await end_first() else "second too late")
        return "second"


@pytest.mark.parametrize("first_comes_first", [True, False])
@leaping
async def test_answers_that_come_together_are_one(first_comes_first: bool) -> None:
    """In the same turn of the loop one of them wins, never both and never neither."""
    rivals = Rivals()
    answers = [rivals.first_answer, rivals.second_answer]
    loop = asyncio.get_running_loop()
    for answer in answers if first_comes_first else reversed(answers):
        loop.call_soon(answer.set_result, None)
    winner, first_won = await race(rivals.first(), 0.0, rivals.second)
    assert winner == ("first" if first_won else "second")
    assert first_won == ("second writes" not in rivals.told)


@leaping
async def test_a_first_request_that_fails_ends_the_second() -> None:
    """Its error comes as it is, not in a group."""
    rivals = Rivals()
    asyncio.get_running_loop().call_soon(
        rivals.first_answer.set_exception, OriginUnavailableError("gone")
    )
    with pytest.raises(OriginUnavailableError, match="gone"):
        await race(rivals.first(), 0.0, rivals.second)


@leaping
async def test_cancelling_a_race_cancels_both_requests() -> None:
    """A download that is given up leaves no request behind."""
    rivals = Rivals()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await race(rivals.first(), 0.0, rivals.second)
    assert sorted(rivals.told) == ["first cancelled", "second cancelled"]
