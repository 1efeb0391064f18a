"""Names of shards lead to keys, entries of all plans are shared, and sample counts outlive their shards."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardcache.cache.planner import History, PlannedShards, Planner, name_of
from shardcache.protocol import ShardRef
from shardcache.store.catalogue import Catalogue
from shardcache.store.shard import Facts


@pytest.mark.parametrize(
    ("learned", "key", "names"),
    [
        ([("url", "key1")], "key1", {"key1": {"key1", "url"}}),
        ([("url", "key1"), ("url", "key2")], "key2", {"key1": {"key1"}, "key2": {"key2", "url"}}),
        ([("url", "v2"), ("url", "url")], "url", {"v2": {"v2"}}),
    ],
    ids=["a bare url", "a replaced object", "a version that comes back"],
)
def test_a_name_leads_to_the_version_learned_last(
    learned: list[tuple[str, str]], key: str, names: dict[str, set[str]]
) -> None:
    """And each key knows its names; when its shard is evicted, they end with it."""
    planner = Planner()
    for now_s, (name, found) in enumerate(learned):
        planner.learn(name, found, now_s)
    assert (planner.key("url"), planner.checked_at_s("url")) == (key, len(learned) - 1)
    assert {each: planner.names(each) for each in names} == names
    planner.forget(key)
    assert (planner.key("url"), planner.checked_at_s("url")) == ("url", float("-inf"))


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


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[History]:
    """A memory in which one shard was seen."""
    catalogue = Catalogue.open(tmp_path)
    found = History(catalogue)
    await found.remember(Facts("s3://b/a.tar", "v1", 2048, 2048, 1024, (1, 2), samples=10))
    yield found
    catalogue.close()


async def test_a_count_belongs_to_its_version(known: History) -> None:
    """It fills in what has that version or none, and never another; a count that is there stays."""
    refs = [
        ShardRef("s3://b/a.tar", "v1", 2048),
        ShardRef("s3://b/a.tar"),
        ShardRef("s3://b/a.tar", "v2"),
        ShardRef("s3://b/a.tar", "v1", 2048, 7),
        ShardRef("s3://b/b.tar", "v1"),
    ]
    assert [ref.samples for ref in await known.fill(refs)] == [10, 10, None, 7, None]


async def test_a_manifest_of_any_length_is_one_question(known: History) -> None:
    """More shards than a statement takes parameters by default (32,766): the known one is found among them."""
    refs = [ShardRef(f"s3://b/{number}.tar") for number in range(40_000)]
    filled = await known.fill([*refs, ShardRef("s3://b/a.tar")])
    assert len(filled) == 40_001 and filled[-1].samples == 10 and filled[0].samples is None
