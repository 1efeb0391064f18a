"""Slots are dealt as the plain rule says, though the quick one looks at few claims."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import OriginBusyError
from shardcache.fetch.connections.priority import Priority
from shardcache.fetch.connections.scheduler import Claim, Scheduler
from support.programs.still_loop import StillLoop, pass_time, turns
from support.shards.brute_slots import BruteSlots

STORES = ("s3://a", "s3://b")


class Work:
    """Knows whether it rests."""

    rests = False

    def halt(self) -> None:
        """Rest."""
        self.rests = True

    def resume(self) -> None:
        """Go on."""
        self.rests = False


@dataclass
class Side:
    """Claims of some downloads on slots of one kind."""

    slots: Scheduler | BruteSlots
    priorities: list[Priority]
    order: list[int] = field(default_factory=list)
    works: dict[int, Work] = field(default_factory=dict)
    ends: dict[int, asyncio.Future[float | None]] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._asks = [lambda number=number: self.priorities[number] for number in range(len(self.priorities))]

    def start(self, number: int, download: int, origin: str, pausable: bool) -> None:
        """Let a claim of a download ask for a slot."""
        self.ends[number] = asyncio.get_running_loop().create_future()
        claim = Claim(self._asks[download], origin)
        self.tasks[number] = asyncio.get_running_loop().create_task(self._use(number, claim, pausable))

    async def _use(self, number: int, claim: Claim, pausable: bool) -> None:
        async with self.slots.hold(claim):
            self.order.append(number)
            claim.work = self.works[number] = Work()
            if not pausable:
                claim.work = None
            try:
                if (time_s := await self.ends[number]) is not None:
                    self.slots.took(claim, 1, time_s)
            finally:
                claim.work = None

    def alive(self) -> list[int]:
        """Return the claims that are not over."""
        return [number for number, task in self.tasks.items() if not task.done()]

    def state(self) -> object:
        """Return who was granted a slot in which order, who rests, and how often somebody had to."""
        alive = self.alive()
        return self.order, [number for number in alive if self._rests(number)], alive, self.slots.pauses

    def _rests(self, number: int) -> bool:
        return number in self.works and self.works[number].rests


ALONE = st.sampled_from([False] * 7 + [True])
BIDS = st.builds(Priority, st.integers(0, 2), st.integers(0, 3).map(float), st.sampled_from([None, "a", "b"]), ALONE)
DOWNLOADS = 5
START = st.tuples(st.just("start"), st.integers(0, DOWNLOADS - 1), st.sampled_from(STORES), st.booleans())
OUTCOMES = st.sampled_from([None, 1.0, 4.0, 20.0, OriginBusyError("busy")])
END = st.tuples(st.just("end"), st.integers(0, 50), OUTCOMES)
RARE = st.one_of(
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("bid"), st.integers(0, DOWNLOADS - 1), BIDS),
    st.tuples(st.just("wait")),
)
# Enough claims to begin with that there is a queue.
STEPS = st.tuples(
    st.lists(START, min_size=10, max_size=20), st.lists(st.one_of(START, END, RARE), min_size=20, max_size=40)
).map(lambda steps: [*steps[0], *steps[1]])


@given(st.integers(1, 5), st.lists(BIDS, min_size=DOWNLOADS, max_size=DOWNLOADS), STEPS)
def test_slots_go_to_whom_the_rule_gives_them(
    count: int, priorities: list[Priority], steps: list[tuple[object, ...]]
) -> None:
    """Whatever comes, goes, changes its bid, fails or has the line to itself: after each step all is the same."""
    with asyncio.Runner(loop_factory=StillLoop) as runner:
        runner.run(compare(count, priorities, steps))


async def compare(count: int, priorities: list[Priority], steps: list[tuple[object, ...]]) -> None:
    """Do the same with both."""
    sides = [Side(slots, list(priorities)) for slots in (Scheduler(count), BruteSlots(count))]
    for number, step in enumerate(steps):
        for side in sides:
            act(side, number, step)
        await turns()
        assert sides[0].state() == sides[1].state()
    while sides[0].alive():
        for side in sides:
            act(side, 0, ("wait",))  # else nobody begins while one has the line to himself
            finish(side, 0, None)
        await turns()
        assert sides[0].state() == sides[1].state()


def act(side: Side, number: int, step: tuple[object, ...]) -> None:
    """Take a step."""
    match step:
        case ("start", int(download), str(origin), bool(pausable)):
            side.start(number, download, origin, pausable)
        case ("end", int(choice), (None | float() | Exception()) as outcome):
            finish(side, choice, outcome)
        case ("cancel", int(choice)) if alive := side.alive():
            side.tasks[alive[choice % len(alive)]].cancel()
        case ("bid", int(download), Priority() as priority):
            side.priorities[download] = priority
            side.slots.deal()
        case ("wait",):
            pass_time(0.6)  # once for each side: more than anybody has the line to himself


def finish(side: Side, choice: int, outcome: float | Exception | None) -> None:
    """Let one end that has a slot, or had one and rests: fail, arrive after so many seconds, or be no part."""
    begun = [number for number in side.alive() if number in side.order]
    if begun:
        end = side.ends[begun[choice % len(begun)]]
        if isinstance(outcome, Exception):
            end.set_exception(outcome)
            side.tasks[begun[choice % len(begun)]].add_done_callback(lambda task: task.exception())
        else:
            end.set_result(outcome)
