"""Connections shared by urgency, between parties, and within what origins take."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import OriginBusyError, OriginUnavailableError
from shardcache.fetch.limits.origin_states import OriginLoad
from shardcache.fetch.limits.scheduler import ASK_AGAIN_S, Scheduler
from shardcache.fetch.limits.slot_claims import WAITING, Claim, Priority
from support.programs.guard import GUARD_S
from support.programs.still_loop import leaping, pass_time, still, turns

PLANNED = Priority(2)
WARM = Priority(3)


class Work:
    """Work that records whether it is paused."""

    def __init__(self) -> None:
        self.paused = False

    def halt(self) -> None:
        """Pause."""
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        """Continue."""
        assert self.paused
        self.paused = False


class Users:
    """Tasks that hold a slot until they are told to let go; their priorities may be changed."""

    def __init__(self, count: int) -> None:
        self.slots = Scheduler(count)
        self.priorities: dict[str, Priority] = {}
        self.order: list[str] = []
        self.claims: dict[str, Claim] = {}
        self.works: dict[str, Work] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(
        self,
        name: str,
        priority: Priority,
        *,
        origin: str = "",
        pausable: bool = False,
        after: str = "",
    ) -> None:
        """Let a task ask for a slot for its own download or the previous task's."""
        self.priorities[name] = priority
        self.claims[name] = Claim(
            self.claims[after].ask_priority if after else lambda: self.priorities[name], origin
        )
        self._ends[name] = asyncio.get_running_loop().create_future()
        self._tasks[name] = asyncio.create_task(self._use(name, pausable))
        await turns()

    async def _use(self, name: str, pausable: bool) -> None:
        claim = self.claims[name]
        async with self.slots.hold(claim):
            self.order.append(name)
            if pausable:
                claim.work = self.works[name] = Work()
            try:
                await self._ends[name]
            finally:
                claim.work = None

    @property
    def holding(self) -> set[str]:
        """Holders of connections."""
        begun = {name for name in self.order if not self._tasks[name].done()}
        return {name for name in begun if name not in self.works or not self.works[name].paused}

    async def finish(self, name: str, failure: Exception | None = None) -> None:
        """Let a task give its slot back."""
        if failure is None:
            self._ends[name].set_result(None)
            await self._tasks[name]
        else:
            self._ends[name].set_exception(failure)
            with pytest.raises(type(failure)):
                await self._tasks[name]
        await turns()

    async def cancel(self, name: str) -> None:
        """Cancel a task, wherever it is."""
        self._tasks[name].cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._tasks[name]
        await turns()


async def test_the_urgent_overtake_and_equals_go_by_deadline_and_arrival() -> None:
    """Lowest class first, then the earliest deadline, then the first to arrive."""
    users = Users(1)
    soon = Priority(2, 5.0)
    priorities = {
        "held": Priority(0),
        "warm": WARM,
        "late": Priority(2, 9.0),
        "soon1": soon,
        "soon2": soon,
    }
    for name, priority in (priorities | {"waiting": Priority(WAITING)}).items():
        await users.start(name, priority)
    expected = ["held", "waiting", "soon1", "soon2", "late", "warm"]
    for name in expected:
        await users.finish(name)
    assert users.order == expected


@leaping
async def test_priorities_are_asked_for_again() -> None:
    """A claim that turned urgent goes first after `ASK_AGAIN_S`, even without a `deal`."""
    users = Users(1)
    for name in ("held", "a", "b"):
        await users.start(name, PLANNED)
    users.priorities["b"] = Priority(1)
    await asyncio.sleep(2 * ASK_AGAIN_S)
    for name in ("held", "b", "a"):
        await users.finish(name)
    assert users.order == ["held", "b", "a"]


async def test_a_cancelled_waiter_costs_no_slot() -> None:
    """The slot goes to the next, whenever the waiter is cancelled."""
    users = Users(1)
    for name in ("held", "queued", "granted", "cancelled", "next"):
        await users.start(name, PLANNED)
    await users.cancel("queued")
    users._ends["held"].set_result(None)
    await asyncio.sleep(0)  # "held" lets go and "granted" has its turn, but did not run yet
    users._tasks["cancelled"].cancel()  # it has not left the queue yet
    await users.cancel("granted")
    assert users.order == ["held", "next"]
    await users.finish("next")
    async with asyncio.timeout(GUARD_S), users.slots.hold(Claim(lambda: PLANNED)):
        pass


async def test_waiting_clients_hold_equally_many_slots() -> None:
    """A client with two parts gets its slots beside one with twelve and earlier deadlines."""
    users = Users(4)
    for number in range(12):
        await users.start(f"many{number}", Priority(WAITING, 1.0, "many"))
    for number in range(2):
        await users.start(f"few{number}", Priority(WAITING, 2.0, "few"))
    await users.finish("many0")
    await users.finish("many1")
    assert Counter(name.rstrip("0123456789") for name in users.holding) == {"many": 2, "few": 2}


async def test_clients_with_equal_shares_take_turns() -> None:
    """One slot never serves a party twice running while the other wants it."""
    users = Users(1)
    for number in range(4):
        await users.start(f"many{number}", Priority(WAITING, 1.0, "many"))
    for number in range(2):
        await users.start(f"few{number}", Priority(WAITING, 2.0, "few"))
    for number in range(6):
        await users.finish(users.order[number])
    assert users.order == ["many0", "few0", "many1", "few1", "many2", "many3"]


async def test_a_waiting_readers_part_takes_the_slot_of_the_least_urgent() -> None:
    """A preempted part pauses, queues with its own priority, and continues where it was."""
    users = Users(2)
    await users.start("soon", Priority(2, 5.0), pausable=True)
    await users.start("late", Priority(2, 9.0), pausable=True)
    await users.start("warm", WARM, pausable=True)
    await users.start("waiting", Priority(WAITING))
    assert users.holding == {"soon", "waiting"}
    await users.start("waiting2", Priority(WAITING))
    assert users.holding == {"waiting", "waiting2"}
    await users.start("waiting3", Priority(WAITING))
    assert users.holding == {"waiting", "waiting2"}
    for name, then in (("waiting", {"waiting2", "waiting3"}), ("waiting2", {"waiting3", "soon"})):
        await users.finish(name)
        assert users.holding == then
    await users.finish("waiting3")
    assert users.holding == {"soon", "late"}
    assert users.slots.pauses == 2


async def test_a_reader_that_begins_to_wait_need_not_wait_for_a_free_slot() -> None:
    """A priority that became urgent counts after `deal`, for parts in the queue and paused ones."""
    users = Users(1)
    await users.start("warm", WARM, pausable=True)
    await users.start("queued", PLANNED, pausable=True)
    users.priorities["queued"] = Priority(WAITING)
    users.slots.reconsider()
    await turns()
    assert users.holding == {"queued"}
    users.priorities |= {"queued": PLANNED, "warm": Priority(WAITING)}
    users.slots.reconsider()
    assert users.holding == {"warm"}


async def test_paused_parts_are_no_more_than_the_slots() -> None:
    """An urgent part beyond that bound waits for a connection like any other."""
    users = Users(1)
    await users.start("first", WARM, pausable=True)
    await users.start("waiting", Priority(WAITING))
    users.priorities["first"] = Priority(4)
    users.slots.reconsider()
    await users.start("second", WARM, pausable=True)
    await users.finish("waiting")
    assert users.holding == {"second"}
    await users.start("waiting2", Priority(WAITING))
    assert users.holding == {"second"}
    await users.finish("second")
    assert users.holding == {"waiting2"}


async def test_a_paused_part_may_end() -> None:
    """Cancelled while paused, it leaves the queue and takes no slot with it."""
    users = Users(1)
    await users.start("warm", WARM, pausable=True)
    await users.start("waiting", Priority(WAITING))
    await users.cancel("warm")
    await users.finish("waiting")
    await users.start("next", WARM)
    assert users.holding == {"next"}


@still
async def test_background_claims_pause_for_a_streamed_download() -> None:
    """Background claims pause despite free slots until its parts have arrived."""
    users = Users(8)
    await users.start("planned", PLANNED, pausable=True)
    await users.start("elsewhere", PLANNED, origin="other", pausable=True)
    await users.start("first part", Priority(WAITING, streamed=True))
    await users.start("next part", PLANNED, after="first part")
    await users.start("new", PLANNED)
    await users.start("waits too", Priority(WAITING))
    assert users.holding == {"elsewhere", "first part", "waits too"}
    await users.finish("first part")
    assert users.holding == {"elsewhere", "next part", "waits too"}
    await users.finish("next part")
    assert users.holding == {"elsewhere", "waits too", "planned", "new"}


async def test_arriving_shards_of_a_client_share_equally() -> None:
    """Whichever reader began to wait first: each will soon have read what has arrived."""
    users = Users(3)
    for name, after in (("a0", ""), ("a1", "a0"), ("a2", "a0"), ("a3", "a0"), ("b0", "")):
        await users.start(
            name, Priority(WAITING, float(name[0] == "b"), streamed=True), after=after
        )
        users.slots.record_time(users.claims["a0"], 1, 1.0)
    await users.finish("a0")
    assert users.holding == {"a1", "a2", "b0"}


@still
async def test_precedence_lasts_while_parts_arrive() -> None:
    """Each part that arrives prolongs it; once none does, the others go on."""
    users = Users(8)
    planned = {f"planned{number}" for number in range(7)}
    for name in sorted(planned):
        await users.start(name, PLANNED, pausable=True)
    await users.start("part", Priority(WAITING, streamed=True))
    for time_s in (1.0, 9.0, 9.0, 9.0, 9.0, 9.0):  # more than one are too many for this line
        assert users.holding <= {"part", "planned0", "planned1"}
        pass_time(0.6)
        users.slots.record_time(users.claims["part"], 1, time_s)
        users.slots.reconsider()
    pass_time(1.1)
    users.slots.reconsider()
    assert users.holding == {"part", *planned}


@still
async def test_parts_of_a_streamed_download_only_saturate_the_link() -> None:
    """More parts would all be late; the queue goes on as parts end, the planned last."""
    users = Users(16)
    for number in range(10):
        await users.start(f"planned{number}", PLANNED, pausable=True)
    users.slots.record_time(users.claims["planned0"], 1, 1.0)
    for _ in range(5):  # all of them share what three could carry
        users.slots.record_time(users.claims["planned9"], 1, 10 / 3)
    assert len(users.holding) == 10
    for number in range(8):
        await users.start(f"part{number}", Priority(WAITING, streamed=True))
    assert users.holding == {f"part{number}" for number in range(5)}
    for number in range(8):
        await users.finish(f"part{number}")
    assert len(users.holding) == 10


async def test_a_busy_origin_gets_fewer_requests_and_others_as_many() -> None:
    """The limit is each origin's own and falls by OriginBusyError alone."""
    users = Users(4)
    for name in "abcd":
        await users.start(name, PLANNED, origin="busy")
    await users.finish("a", OriginUnavailableError("reset"))
    await users.finish("b", OriginBusyError("503"))
    await users.finish("c", OriginBusyError("503"))
    assert users.slots.loads() == [OriginLoad("busy", connections=1, limit=2, throttled=1)]
    texts = ["busy throttles to 2 of 4 connections", "1 of 4 connections"]
    assert [(limit.text, limit.holds) for limit in users.slots.limits()] == [
        (text, False) for text in texts
    ]
    for name in "ef":
        await users.start(name, PLANNED, origin="busy")
    for name in "xyz":
        await users.start(name, WARM, origin="other")
    assert users.holding == {"d", "e", "x", "y"}
    await users.finish("x")
    assert users.holding == {"d", "e", "y", "z"}


async def test_a_waiting_reader_takes_a_slot_of_its_own_busy_origin() -> None:
    """A slot of another origin would be of no use to it."""
    users = Users(2)
    await users.start("failing", PLANNED, origin="busy")
    await users.finish("failing", OriginBusyError("503"))
    await users.start("warm", WARM, origin="other", pausable=True)
    await users.start("planned", PLANNED, origin="busy", pausable=True)
    await users.start("waiting", Priority(WAITING), origin="busy")
    assert users.holding == {"warm", "waiting"}


PRIORITIES = st.builds(
    Priority, st.integers(0, 3), st.integers(0, 3).map(float), st.sampled_from([None, "a", "b"])
)
STEPS = st.lists(st.one_of(st.tuples(PRIORITIES, st.booleans()), st.integers(0, 20)), max_size=40)


@given(st.integers(1, 4), STEPS)
async def test_rules_hold_whatever_comes_and_goes(
    count: int, steps: list[tuple[Priority, bool] | int]
) -> None:
    """Slots are never exceeded, nor free during a queue, and no turn is lost."""
    users = Users(count)
    for number, step in enumerate(steps):
        if not isinstance(step, int):
            await users.start(str(number), step[0], pausable=step[1])
        elif users.holding:
            await users.finish(sorted(users.holding, key=int)[step % len(users.holding)])
        check(users, count)
    while users.holding:
        await users.finish(min(users.holding, key=int))
        check(users, count)
    assert set(users.order) == set(users.claims)


def check(users: Users, count: int) -> None:
    """Compare the state with the rules."""
    alive = {name for name, task in users._tasks.items() if not task.done()}
    paused = {name for name in alive if name in users.works and users.works[name].paused}
    queued = alive - users.holding
    assert len(users.holding) == min(count, len(alive))
    assert len(paused) <= count
    if any(users.priorities[name].waiting for name in queued) and len(paused) < count:
        assert not any(
            name in users.works and not users.priorities[name].waiting for name in users.holding
        )


async def test_origins_in_use_and_the_last_ones_are_remembered() -> None:
    """A fixed number of rows is kept for any hosts, with what was learnt about them."""
    slots = Scheduler(3)
    busy = Claim(lambda: PLANNED, "busy")
    async with slots.hold(busy):
        for number in range(600):
            with suppress(OriginBusyError):
                async with slots.hold(Claim(lambda: PLANNED, f"host {number}")):
                    raise OriginBusyError("slow down")
        loads = {load.name: load for load in slots.loads()}
        assert len(loads) == 64
        assert loads["busy"].connections == 1
        assert loads["host 599"].throttled == 1
        assert "host 1" not in loads
