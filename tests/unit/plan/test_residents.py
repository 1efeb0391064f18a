"""Choice of the shards to evict, in cases that are worth naming; `test_schedule` tries any others."""

from __future__ import annotations

from shardcache.plan.residents import Residents
from shardcache.plan.sieve import Sieve
from shardcache.plan.timeline import Timeline


def residents_of(*plans: list[str], here: list[str]) -> tuple[Timeline, Residents]:
    """Return what is here, each shard of size 10, and sessions with these plans that read a shard a second."""
    timeline = Timeline()
    timeline.tick(0.0)
    residents = Residents(timeline, lambda key: (key,), Sieve())
    for shard in here:
        residents.add(shard, 10)
    for session, plan in enumerate(plans):
        timeline.declare(session, 1.0)
        timeline.extend(session, plan)
        for shard in plan:
            residents.planned(shard)
    return timeline, residents


def victims(residents: Residents, wanted_bytes: int, needed_at_s: float = -1.0) -> list[str] | None:
    """Return what would go."""
    return residents.victims(wanted_bytes, needed_at_s, spare_planned=False)


def test_nothing_goes_when_nothing_is_wanted() -> None:
    """A cache with room evicts nothing."""
    assert victims(residents_of(here=["a"])[1], 0) == []


def test_what_nobody_plans_goes_first_and_the_furthest_next() -> None:
    """Two unplanned in the order of their coming, then the planned from the end."""
    _, residents = residents_of(["a", "b"], here=["old", "a", "new", "b"])
    assert victims(residents, 40) == ["old", "new", "b", "a"]


def test_what_was_used_again_is_spared_once_nobody_plans_it() -> None:
    """A shard that several asked for outlives one that was read once."""
    timeline, residents = residents_of(["used", "once"], here=["used", "once"])
    residents.use_again("used")
    reader_plan = timeline.forget(0)
    assert reader_plan is not None
    residents.forget(reader_plan)
    assert victims(residents, 20) == ["once", "used"]


def test_a_shard_in_hand_stays() -> None:
    """Neither the unplanned nor the furthest goes while somebody holds it."""
    _, residents = residents_of(["a", "b"], here=["a", "b", "c"])
    residents.hold("b")
    residents.hold("c")
    assert victims(residents, 10) == ["a"]
    assert victims(residents, 20) is None
    residents.free("b")
    assert victims(residents, 10) == ["b"]


def test_a_small_shard_is_not_evicted_beside_a_large_one_that_suffices() -> None:
    """The furthest comes first, but what another's bytes make needless stays."""
    _, residents = residents_of(["big", "small"], here=[])
    residents.add("small", 1)
    residents.add("big", 100)
    assert victims(residents, 50) == ["big"]
    assert victims(residents, 101) == ["small", "big"]


def test_more_orphans_than_are_looked_at_at_once() -> None:
    """When a large plan ends, what others plan still stays, and what nobody plans is found, however deep it lies."""
    many = [f"shard-{number}" for number in range(2000)]
    timeline, residents = residents_of(many, many[1:], here=many)
    timeline.waits(0, 1000)
    for shard in many[:1000]:
        residents.passed(shard)
    reader_plan = timeline.forget(0)
    assert reader_plan is not None
    residents.forget(reader_plan)
    assert victims(residents, 10) == [many[0]]
    assert victims(residents, 20) == [many[0], many[-1]]


def test_queues_do_not_grow_with_time() -> None:
    """A shard that is held and put down for ever leaves no trail of old entries."""
    _, residents = residents_of(["a", "b", "a"], here=["a", "b"])
    for _ in range(10_000):
        residents.hold("a")
        residents.free("a")
    assert sum(map(len, residents._queues.values())) < 200
