"""planner.py: names of shards lead to keys, and entries of all plans are shared."""

from __future__ import annotations

from shardcache.cache.planner import PlannedShards, Planner, name_of
from shardcache.protocol import ShardRef


def test_a_name_without_a_version_leads_to_what_the_store_had() -> None:
    """Once asked for, a bare url leads to the version found, and that key knows the url."""
    names, name = Planner(), name_of(ShardRef("s3://b/a.tar"))
    names.learn(name, "key1", 10.0)
    assert names.key(name) == "key1"
    assert names.names("key1") == {"key1", name}
    assert names.checked_at_s(name) == 10.0


def test_a_replaced_object_moves_its_name() -> None:
    """After the store's object changed, the old key is known by no url any more."""
    names = Planner()
    names.learn("url", "key1", 1.0)
    names.learn("url", "key2", 2.0)
    assert names.key("url") == "key2"
    assert names.names("key1") == {"key1"}


def test_an_evicted_shard_is_forgotten() -> None:
    """Aliases end with their file."""
    names = Planner()
    names.learn("url", "key1", 1.0)
    names.forget("key1")
    assert names.key("url") == "url"
    assert names.checked_at_s("url") == float("-inf")


def test_a_version_that_comes_back_is_its_own_again() -> None:
    """After the store went from v1 to v2 and back, the name of v1 leads to v1."""
    names = Planner()
    names.learn("v1", "v2", 1.0)
    names.learn("v1", "v1", 2.0)
    assert names.key("v1") == "v1"
    assert names.names("v2") == {"v2"}


def test_old_names_of_missing_shards_are_forgotten() -> None:
    """However many shards are asked for, only so many answers are kept, the newest."""
    names = Planner(remembered=10)
    for number in range(1000):
        names.learn(f"url{number}", f"key{number}", 1.0)
        names.learn_size(f"url{number}", 5)
    assert "10 remembered" in repr(names)
    assert names.key("url0") == "url0"
    assert names.names("key0") == {"key0"}
    assert (names.key("url999"), names.size_bytes("url999")) == ("key999", 5)


def test_names_of_cached_shards_are_kept() -> None:
    """A shard in the cache is found by its url, however many others were asked for since."""
    here = {"key0"}
    names = Planner(here, remembered=10)
    for number in range(1000):
        names.learn(f"url{number}", f"key{number}", 1.0)
    assert names.key("url0") == "key0"
    assert names.names("key0") == {"key0", "url0"}
    assert "11 remembered" in repr(names) or "10 remembered" in repr(names)


def test_equal_shards_are_one_object() -> None:
    """Two readers' plans have the same object in hand, with the name that the cache knows it by."""
    shards = PlannedShards()
    one, other = shards.of(ShardRef("s3://b/a.tar", "v1", 1, 2)), shards.of(ShardRef("s3://b/a.tar", "v1", 1, 2))
    assert one is other
    assert one.name == name_of(one.ref)


def test_shards_that_differ_stay_apart() -> None:
    """Another version, size or number of samples is another shard of a plan, of the same name or not."""
    shards = PlannedShards()
    refs = [ShardRef("s3://b/a.tar", *rest) for rest in ((None, None, None), ("v1", 1, 2), ("v2", 1, 2), ("v1", 1, 3))]
    assert [shards.of(ref).ref for ref in refs] == refs


def test_shards_of_no_plan_are_forgotten() -> None:
    """Memory is bounded by the plans that there are."""
    shards = PlannedShards()
    plan = [shards.of(ShardRef(f"s3://b/{number}.tar")) for number in range(10)]
    assert len(shards) == 10
    plan.clear()
    assert len(shards) == 0
