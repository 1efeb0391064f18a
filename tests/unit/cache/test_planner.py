"""Names of shards lead to keys, entries of all plans are shared, and sample counts outlive their shards."""

import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from shardcache.cache.planner import History, Planner, name_of
from shardcache.cache.readers import Readers
from shardcache.cache.transfers import Leasing
from shardcache.cache.waits import Turns
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
    """However many are asked for, only the newest answers are kept, and those of cached shards."""
    names = Planner({"key0"}, remembered=10)
    for number in range(1000):
        names.learn(f"url{number}", f"key{number}", 1.0)
        names.learn_size(f"url{number}", 5)
    assert "11 remembered" in repr(names) or "10 remembered" in repr(names)
    assert (names.key("url0"), names.names("key0")) == ("key0", {"key0", "url0"})
    assert (names.key("url1"), names.names("key1")) == ("url1", {"key1"})
    assert (names.key("url999"), names.size_bytes("url999")) == ("key999", 5)


def test_equal_shards_of_plans_are_one_object() -> None:
    """Another version, size or number of samples is another shard; what no plan has any more is forgotten."""
    readers = Readers(cast(Leasing, None), Turns(), plan_memory_bytes=0)
    refs = [ShardRef("s3://b/a.tar", *rest) for rest in ((None, None, None), ("v1", 1, 2), ("v2", 1, 2), ("v1", 1, 3))]
    plan, other = ([readers.planned(replace(ref)) for ref in refs] for _ in range(2))
    assert all(one is same for one, same in zip(plan, other, strict=True))
    assert [(planned.ref, planned.name) for planned in plan] == [(ref, name_of(ref)) for ref in refs]
    assert len(set(map(id, plan))) == 4
    known = [weakref.ref(planned) for planned in plan]
    plan.clear()
    other.clear()
    assert not any(planned() for planned in known)


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[History]:
    catalogue = Catalogue(tmp_path)
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
