"""part_plan.py: parts and objects are evicted by announced ranges, in memory that does not grow."""

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.part_plan import PartPlan
from shardcache.plan.part_replay import PartReplay, PartRules
from shardcache.plan.reader_plan import AFTER_ALL_PLANS, NOW, ReaderPlan
from shardcache.plan.schedule import SameName, Schedule
from support.cases import examples

PART_BYTES = 100
OBJECTS = 10
PARTS = 20  # of each object
Part = tuple[int, int]  # numbers of the object, and of the part in it


class Clock:
    """A schedule, and its time, which a test moves."""

    def __init__(self) -> None:
        self.schedule: Schedule[str] = Schedule(SameName())
        self.now_s = 0.0

    def __call__(self) -> Schedule[str]:
        self.schedule.tick(self.now_s)
        return self.schedule

    def plan(self, session: str) -> PartPlan[str]:
        plan = PartPlan(self, session)
        plan.begin()
        return plan

    def victims(self, parts: int, needed_at_s: float = NOW) -> list[str] | None:
        return self().victims(parts * PART_BYTES, needed_at_s, lead_s=0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_part_that_is_needed_last_is_evicted_first(clock: Clock) -> None:
    """But those that were not announced go before it."""
    plan = clock.plan("reader")
    for number, part in enumerate(("o/2", "o/0", "o/1", "o/2")):
        plan.add([(number, ["o", part])])
    for part in ("o/0", "o/1", "o/2", "other/0"):
        clock().arrived(part, PART_BYTES)
    assert clock.victims(3) == ["other/0", "o/1", "o/0"]

    plan.passed(0)  # the next use of part 2 is the last one now
    assert clock.victims(3) == ["other/0", "o/2", "o/1"]


def test_nothing_announced_is_evicted_for_bytes_that_nobody_asked_for(clock: Clock) -> None:
    plan = clock.plan("reader")
    plan.add([(0, ["o", "o/0"])])
    clock().arrived("o/0", PART_BYTES)
    clock().arrived("o/1", PART_BYTES)
    assert clock.victims(1, AFTER_ALL_PLANS) == ["o/1"]
    assert clock.victims(2, AFTER_ALL_PLANS) is None


def test_whole_object_is_needed_with_the_first_of_its_ranges(clock: Clock) -> None:
    """It stays while any of its ranges is announced."""
    plan = clock.plan("reader")
    plan.add([(10, ["a", "a/5"])])
    plan.add([(20, ["b", "b/0"])])
    plan.add([(30, ["a", "a/1"])])
    for key in ("a", "b", "c"):
        clock().arrived(key, PART_BYTES)
    assert clock.victims(3) == ["c", "b", "a"]
    plan.passed(10)
    assert clock.victims(3) == ["c", "a", "b"]
    plan.passed(30)
    assert clock.victims(3, AFTER_ALL_PLANS) is not None


def test_parts_of_a_fast_reader_are_needed_before_those_of_a_slow_one(clock: Clock) -> None:
    """Though they are further ahead in its order."""
    plans = {"fast": clock.plan("fast"), "slow": clock.plan("slow")}
    for session, plan in plans.items():
        for number in range(4_000):
            plan.add([(number, [session, f"{session}/{number}"])])
    for second in range(1, 11):
        clock.now_s = float(second)
        plans["fast"].passed(200 * second)
        plans["slow"].passed(10 * second if second % 5 == 0 else 0)
    clock().arrived("fast/2400", PART_BYTES)  # in two seconds
    clock().arrived("slow/300", PART_BYTES)  # in twenty
    assert clock.victims(1) == ["slow/300"]


def test_plan_of_parts_is_not_fetched_ahead(clock: Clock) -> None:
    plan = clock.plan("reader")
    plan.add([(0, ["o", "o/0"])])
    schedule = clock()
    assert schedule.next_missing(lambda name: False) is None
    assert list(schedule.ahead("reader", 1e9, 10)) == []
    assert schedule.shards_per_s("reader") == 0.0


def test_reader_that_leaves_keeps_nothing(clock: Clock) -> None:
    plan = clock.plan("reader")
    plan.add([(0, ["o", "o/0"])])
    clock().arrived("o/0", PART_BYTES)
    clock().forget("reader")
    assert clock.victims(1, AFTER_ALL_PLANS) == ["o/0"]


def test_plan_forgets_what_was_read() -> None:
    """So its memory depends on what is announced, however much was read before."""
    plan = ReaderPlan(0.001, 0.0, is_of_parts=True)
    ahead = 1_000
    for position in range(20_000):
        name = f"o/{position % (2 * ahead)}"  # twice as many parts as are announced at a time
        assert plan.append(name, next_use=None) == position
        passed = [number for _, number in plan.move(position - ahead)]
        assert passed in ([], [position - ahead - 1])
        plan.forget_passed()
        assert plan.end_position == position + 1
    assert len(plan.names) < 6 * ahead


def orders(seed: int, readers: int, epochs: int) -> list[list[Part]]:
    """Return the parts that each reader reads: those of a permutation of all in each epoch."""
    rng = random.Random(seed)
    parts = [(number, part) for number in range(OBJECTS) for part in range(PARTS)]
    read: list[list[Part]] = [[] for _ in range(readers)]
    for _ in range(epochs):
        permuted = rng.sample(parts, len(parts))
        for reader in range(readers):
            read[reader] += permuted[reader::readers]
    return read


def fetched_parts(all_orders: Sequence[Sequence[Part]], cached: int, *, announced: int) -> int:
    """Return the number of parts that a cache fetches for readers which take turns.

    Args:
        all_orders: the parts that each reader reads.
        cached: number of parts that the cache has space for.
        announced: number of parts that each reader announces ahead.
    """
    rules = PartRules(cached * PART_BYTES, PART_BYTES, 1.0, lambda size_bytes: size_bytes, 0, 0)
    cache = PartReplay([PARTS * PART_BYTES] * OBJECTS, rules)
    plans = [cache.plan(reader) for reader in range(len(all_orders))]
    for number in range(len(all_orders[0])):
        for plan, order in zip(plans, all_orders, strict=True):
            for later in _newly_announced(number, announced, len(order)):
                plan.add([(later, cache.names(*_span(order[later])))])
            asked = cache.ask(*_span(order[number]))
            plan.passed(number)
            cache.read(asked)
    return cache.store_bytes // PART_BYTES


def _newly_announced(number: int, announced: int, end: int) -> Iterator[int]:
    """Yield the numbers of the parts that are announced before the part of a number is read."""
    first = number + announced - 1 if number else 0
    yield from range(first, min(number + announced, end))


def _span(part: Part) -> tuple[int, int, int]:
    number, index = part
    return number, index * PART_BYTES, (index + 1) * PART_BYTES


def least_fetches(order: Sequence[Part], cached: int) -> int:
    """Return the number of fetches of L. Belady's MIN, for parts of one size."""
    next_use: list[float] = [float("inf")] * len(order)
    seen: dict[Part, int] = {}
    for number in reversed(range(len(order))):
        next_use[number] = seen.get(order[number], float("inf"))
        seen[order[number]] = number
    held: dict[Part, float] = {}
    fetches = 0
    for number, part in enumerate(order):
        if part not in held:
            fetches += 1
            if len(held) == cached:
                del held[max(held, key=held.__getitem__)]
        held[part] = next_use[number]
    return fetches


@pytest.mark.parametrize("cached", [20, 60, 100, 180])
def test_fully_announced_order_has_as_few_fetches_as_possible(cached: int) -> None:
    (order,) = orders(seed=1, readers=1, epochs=4)
    assert fetched_parts([order], cached, announced=len(order)) == least_fetches(order, cached)


@pytest.mark.parametrize("readers", [1, 2])
def test_half_an_epoch_ahead_saves_much_over_the_sieve(readers: int) -> None:
    """With a cache for half of the parts."""
    all_orders = orders(seed=2, readers=readers, epochs=4)
    ahead = OBJECTS * PARTS // readers // 2
    announced = fetched_parts(all_orders, OBJECTS * PARTS // 2, announced=ahead)
    unannounced = fetched_parts(all_orders, OBJECTS * PARTS // 2, announced=0)
    assert announced < unannounced * 0.85


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 4]),
    st.integers(8, 200),
    st.integers(0, 400),
)
@examples(20)
def test_more_announced_parts_never_cost_much(
    seed: int, readers: int, cached: int, announced: int
) -> None:
    all_orders = orders(seed, readers, epochs=2)
    unannounced = fetched_parts(all_orders, cached, announced=0)
    assert fetched_parts(all_orders, cached, announced=announced) <= unannounced * 1.05
