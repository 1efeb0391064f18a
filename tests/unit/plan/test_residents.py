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


def test_a_cache_with_space_evicts_nothing() -> None:
    """A cache with room evicts nothing."""
    assert victims(residents_of(here=["a"])[1], 0) == []


def test_unplanned_shards_are_evicted_first_then_the_furthest() -> None:
    """Two unplanned in the order of their coming, then the planned from the end."""
    _, residents = residents_of(["a", "b"], here=["old", "a", "new", "b"])
    assert victims(residents, 40) == ["old", "new", "b", "a"]


def test_a_shard_used_again_is_spared_once_unplanned() -> None:
    """A shard that several asked for outlives one that was read once."""
    timeline, residents = residents_of(["used", "once"], here=["used", "once"])
    residents.use_again("used")
    reader_plan = timeline.forget(0)
    assert reader_plan is not None
    residents.forget(reader_plan)
    assert victims(residents, 20) == ["once", "used"]


def test_shards_of_a_large_ended_plan_are_evicted_first() -> None:
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
