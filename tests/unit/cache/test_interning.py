"""interning.py: what many plans name is in memory once, and as long as one of them names it."""

from __future__ import annotations

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.catalog.interning import PlannedShards
from shardcache.protocol import ShardRef


def test_equal_shards_are_one() -> None:
    """Two readers' plans have the same object in hand, with the name that the cache knows it by."""
    shards = PlannedShards()
    one, other = shards.of(ShardRef("s3://b/a.tar", "v1", 1, 2)), shards.of(ShardRef("s3://b/a.tar", "v1", 1, 2))
    assert one is other
    assert one.name == AliasTable.of(one.ref)


def test_shards_that_differ_stay_apart() -> None:
    """Another version, size or number of samples is another shard of a plan, of the same name or not."""
    shards = PlannedShards()
    refs = [ShardRef("s3://b/a.tar", *rest) for rest in ((None, None, None), ("v1", 1, 2), ("v2", 1, 2), ("v1", 1, 3))]
    assert [shards.of(ref).ref for ref in refs] == refs


def test_what_no_plan_names_is_forgotten() -> None:
    """Memory is bounded by the plans that there are."""
    shards = PlannedShards()
    plan = [shards.of(ShardRef(f"s3://b/{number}.tar")) for number in range(10)]
    assert repr(shards) == "PlannedShards(10)"
    plan.clear()
    assert repr(shards) == "PlannedShards(0)"
