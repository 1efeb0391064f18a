"""The heart: optimal where the optimum can be known, and never against its rules anywhere."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardcache.plan.replay import Read, Replay, furthest_next, misses
from shardcache.plan.schedule import SameName, Schedule
from support.cases import examples

SHARDS = st.sampled_from("abcdef")


@dataclass(frozen=True, slots=True)
class Job:
    epochs: Sequence[Sequence[str]]  # what it reads, shard by shard
    start_s: float = 0.0  # when it begins
    seconds_per_shard: float = 1.0  # from taking one shard to taking the next
    window: int = 1  # how many shards it has in hand at a time; at the end of an epoch none

    def reads(self, job: int) -> Iterator[Read]:
        """Yield its reads, as the job of this number."""
        start_s = self.start_s
        for number, epoch in enumerate(self.epochs):
            times_s = [
                start_s + position * self.seconds_per_shard for position in range(len(epoch) + 1)
            ]
            for position, shard in enumerate(epoch):
                end_s = times_s[min(position + self.window, len(epoch))]
                yield Read(times_s[position], job, number, position, shard, end_s)
            start_s = times_s[-1]


def all_reads(jobs: Sequence[Job]) -> list[Read]:
    return sorted(read for number, job in enumerate(jobs) for read in job.reads(number))


def least_fetches(jobs: Sequence[Job], capacity: int) -> int:
    """Return how few fetches any policy could do with, by trying every choice; exponential."""
    reads = all_reads(jobs)
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for number, read in enumerate(reads):
        in_hand = {other.shard for other in reads[:number] if other.end_s > read.start_s}
        following: dict[frozenset[str], int] = {}
        for state, fetches in states.items():
            for successor in _successors(state, read.shard, in_hand, capacity):
                cost = fetches + (read.shard not in state)
                following[successor] = min(cost, following.get(successor, cost))
        states = following
    return min(states.values())


def _successors(
    state: frozenset[str], shard: str, in_hand: set[str], capacity: int
) -> Iterator[frozenset[str]]:
    if shard in state:
        yield state
    elif len(state) < capacity:
        yield state | {shard}
    else:
        for victim in state - in_hand:
            yield (state - {victim}) | {shard}


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Up to three jobs, each at its own pace, no two events at one time."""
    return [
        Job(
            [draw(st.lists(SHARDS, min_size=1, max_size=6))],
            start_s=number / 10,
            seconds_per_shard=draw(st.sampled_from([1.0, 1.5, 3.0])) + number / 1000,
            window=draw(st.integers(1, 3)),
        )
        for number in range(draw(st.integers(1, 3)))
    ]


@pytest.mark.slow
@given(jobs(), st.integers(0, 2))
@examples(200)
def test_fetches_are_as_few_as_possible(some_jobs: list[Job], spare: int) -> None:
    """Exhaustive search finds nothing better on small timelines of equal shards."""
    capacity = sum(job.window for job in some_jobs) + spare
    reads = all_reads(some_jobs)
    least = least_fetches(some_jobs, capacity)
    assert len(Replay(reads, capacity, declare_first_epochs=True).fetched) == least
    assert len([*misses(reads, furthest_next(reads), capacity)]) == least


TWENTY = [f"shard-{number}" for number in range(20)]


@pytest.mark.parametrize(
    ("capacity", "window"),
    [(2, 1), (5, 1), (10, 1), (19, 1), (20, 1), (5, 4), (10, 4), (19, 8), (20, 8)],
)
def test_each_epoch_hits_the_shards_that_the_cache_keeps(capacity: int, window: int) -> None:
    """C shards kept save C fetches an epoch, less the W leased at a time at most."""
    order = random.Random(7)
    job = Job([order.sample(TWENTY, 20) for _ in range(12)], window=window)
    saved = 12 * 20 - len(Replay(all_reads([job]), capacity).fetched)
    assert 11 * (capacity - window) <= saved <= 11 * capacity


def test_a_loop_larger_than_the_cache_still_hits() -> None:
    """The same shards round and round give C hits in each, and none with LRU."""
    assert len(Replay(all_reads([Job([TWENTY] * 8)]), 10).fetched) == 20 + 7 * 10


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(4, 12))
@examples(30)
def test_two_known_epochs_are_nearly_as_good_as_all(seed: int, count: int, capacity: int) -> None:
    """A plan ending after the next epoch costs a few fetches more than full knowledge."""
    order = random.Random(seed)
    shards = [f"shard-{number}" for number in range(16)]

    def fetches(known_epochs: int) -> int:
        order.seed(seed)
        some_jobs = [
            Job([order.sample(shards, 16) for _ in range(6)], 5.3 * number, 1 + number / 100)
            for number in range(count)
        ]
        return len(Replay(all_reads(some_jobs), capacity, known_epochs=known_epochs).fetched)

    assert fetches(2) <= fetches(6) * 1.1 + 2


def schedule_of(*plans: Sequence[str], here: Sequence[str] = ()) -> Schedule[int]:
    """Return a schedule of cached shards of size 10, and of sessions with these plans."""
    schedule: Schedule[int] = Schedule(SameName())
    schedule.tick(0.0)
    for shard in here:
        schedule.arrived(shard, 10)
    for session, plan in enumerate(plans):
        schedule.declare(session, 1.0)
        schedule.extend(session, plan)
    return schedule


def test_an_early_fetch_evicts_only_unplanned_shards() -> None:
    """Before the lead time a planned shard stays, however far away, and an unplanned one goes."""
    schedule = schedule_of("abcdefgha", here="h")
    assert schedule.victims(1, needed_at_s=5.0, lead_s=4.0) is None
    assert schedule.victims(1, needed_at_s=5.0, lead_s=5.0) == ["h"]
    schedule.arrived("stranger", 1)
    assert schedule.victims(1, needed_at_s=5.0, lead_s=4.0) == ["stranger"]


def test_unplanned_shards_are_evicted_in_order_of_arrival_then_the_furthest() -> None:
    """Unplanned shards go in order of arrival, then the furthest planned; none with space."""
    schedule = schedule_of("ab", here=["old", "a", "new", "b"])
    assert schedule.victims(0, -1.0, math.inf) == []
    assert schedule.victims(40, -1.0, math.inf) == ["old", "new", "b", "a"]


def test_a_shard_used_again_is_spared_once_unplanned() -> None:
    """A shard that several asked for outlives one that was read once."""
    schedule = schedule_of(["used", "once"], here=["used", "once"])
    schedule.used("used")
    schedule.forget(0)
    assert schedule.victims(20, -1.0, math.inf) == ["once", "used"]


def test_shards_of_a_large_ended_plan_are_evicted_first() -> None:
    """Shards that other plans need stay, and unplanned shards are found at any depth."""
    many = [f"shard-{number}" for number in range(2000)]
    schedule = schedule_of(many, many[1:], here=many)
    schedule.waits(0, 1000)
    schedule.forget(0)
    assert schedule.victims(10, -1.0, math.inf) == [many[0]]
    assert schedule.victims(20, -1.0, math.inf) == [many[0], many[-1]]


def test_queues_do_not_grow_with_time() -> None:
    """A shard that is leased and released again and again leaves no trail of old entries."""
    schedule = schedule_of("aba", here="ab")
    for _ in range(10_000):
        schedule.held("a")
        schedule.freed("a")
    assert sum(map(len, schedule._queues.values())) < 200


def test_a_fast_job_needs_a_far_position_before_a_slow_one_a_near_one() -> None:
    """Time decides, not the number of shards in between."""
    schedule = schedule_of("abcde", here="abcdv")
    schedule.declare(1, seconds_per_shard=60.0)
    schedule.extend(1, "vwxyz")
    assert schedule.next_missing({*"abcdv"}.__contains__) == ("e", 4.0, 0, 4)


@dataclass
class Session:
    plan: list[str] = field(default_factory=list)
    cursor: int = 0
    hand: list[int] = field(default_factory=list)


class AnyTimeline(RuleBasedStateMachine):
    """Sessions and shards do anything; every decision is checked by looking at everything."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(SameName())
        self.now_s = 0.0
        self.sessions: dict[int, Session] = {}
        self.sizes: dict[str, int] = {}
        self.held: Counter[str] = Counter()
        self.schedule.tick(0.0)

    def hold(self, shard: str) -> None:
        self.held[shard] += 1
        if self.held[shard] == 1:
            self.schedule.held(shard)

    def drop(self, shard: str) -> None:
        self.held[shard] -= 1
        if not self.held[shard]:
            self.schedule.freed(shard)

    def empty(self, session: Session) -> None:
        for position in session.hand:
            self.drop(session.plan[position])
        session.hand.clear()

    @rule(passed_s=st.sampled_from([0.0, 0.25, 1.0, 10.0]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.schedule.tick(self.now_s)

    @rule(
        number=st.integers(0, 3),
        plan=st.lists(SHARDS, max_size=8),
        pace_s=st.sampled_from([None, 0.5, 2.0]),
    )
    def declare(self, number: int, plan: list[str], pace_s: float | None) -> None:
        self.empty(self.sessions.get(number, Session()))
        self.schedule.declare(number, pace_s)
        self.schedule.extend(number, plan)
        self.sessions[number] = Session(list(plan))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), more=st.lists(SHARDS, max_size=4))
    def extend(self, data: st.DataObject, more: list[str]) -> None:
        number = data.draw(st.sampled_from(sorted(self.sessions)))
        self.schedule.extend(number, more)
        self.sessions[number].plan += more

    @precondition(lambda self: any(session.plan for session in self.sessions.values()))
    @rule(data=st.data(), event=st.sampled_from(["waits", "reads"]), skipped=st.integers(-2, 2))
    def go_on(self, data: st.DataObject, event: str, skipped: int) -> None:
        """A session waits for a position or takes it, beside others; it may skip or repeat."""
        number = data.draw(
            st.sampled_from([number for number, session in self.sessions.items() if session.plan])
        )
        session = self.sessions[number]
        position = max(0, min(session.cursor + skipped, len(session.plan) - 1))
        shard = session.plan[position]
        if event == "reads" and shard in self.sizes:
            session.hand.append(position)
            self.hold(shard)
        getattr(self.schedule, event)(number, position)
        session.cursor = max(session.cursor, position)

    @precondition(lambda self: any(session.hand for session in self.sessions.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A session is done with any of the shards in its hands."""
        number = data.draw(
            st.sampled_from([number for number, session in self.sessions.items() if session.hand])
        )
        session = self.sessions[number]
        position = session.hand.pop(data.draw(st.integers(0, len(session.hand) - 1)))
        self.schedule.done(number, position)
        self.drop(session.plan[position])
        session.cursor = max(session.cursor, position + 1)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sessions)))
        self.empty(self.sessions.pop(number))
        self.schedule.forget(number)

    @rule(shard=SHARDS, size_bytes=st.integers(1, 5))
    def arrive(self, shard: str, size_bytes: int) -> None:
        if shard not in self.sizes:
            self.schedule.arrived(shard, size_bytes)
            self.sizes[shard] = size_bytes

    @rule(shard=SHARDS)
    def use(self, shard: str) -> None:
        """A shard is looked at for a moment, by nobody's plan."""
        if shard in self.sizes:
            self.schedule.used(shard)
            self.hold(shard)
            self.drop(shard)

    @rule(
        wanted_bytes=st.integers(1, 12),
        needed_in_s=st.sampled_from([-math.inf, 0.0, 1.0, 3.0, 1e9]),
    )
    def evict(self, wanted_bytes: int, needed_in_s: float) -> None:
        """A decision is made, checked against every resident, and carried out."""
        needed_at_s = self.now_s + needed_in_s
        allowed = {
            s for s in self.sizes if not self.held[s] and self.schedule.next_use_s(s) > needed_at_s
        }
        victims = self.schedule.victims(wanted_bytes, needed_at_s, lead_s=math.inf)
        if victims is None:
            assert sum(self.sizes[shard] for shard in allowed) < wanted_bytes
            return
        freed_bytes = sum(self.sizes[shard] for shard in victims)
        assert len(set(victims)) == len(victims)
        assert allowed.issuperset(victims), "only what is free and needed later"
        assert freed_bytes >= wanted_bytes
        assert all(freed_bytes - self.sizes[shard] < wanted_bytes for shard in victims), (
            "none without need"
        )
        furthest = max(map(self.schedule.next_use_s, allowed))
        if max(self.sizes[shard] for shard in allowed) == min(
            self.sizes[shard] for shard in allowed
        ):
            assert self.schedule.next_use_s(victims[0]) == furthest
            spared_s = max(
                map(self.schedule.next_use_s, allowed.difference(victims)), default=-math.inf
            )
            assert min(map(self.schedule.next_use_s, victims)) >= spared_s, "the furthest"
        for shard in victims:
            self.schedule.gone(shard)
            del self.sizes[shard]

    @invariant()
    def the_soonest_missing_shard_is_named(self) -> None:
        """No missing shard is needed before the one that is to be fetched next."""
        planned = {
            shard for session in self.sessions.values() for shard in session.plan[session.cursor :]
        }
        missing = {shard: self.schedule.next_use_s(shard) for shard in planned - self.sizes.keys()}
        found = self.schedule.next_missing(self.sizes.__contains__)
        if found is None:
            assert not missing
        else:
            assert missing[found.name] == found.needed_at_s == min(missing.values())
            session = self.sessions[found.session]
            assert session.plan[found.position] == found.name
            assert found.position >= session.cursor


TestAnyTimeline = AnyTimeline.TestCase
TestAnyTimeline.settings = examples(60, stateful_step_count=40)
