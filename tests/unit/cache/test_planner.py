"""Shard names lead to keys, lists belong to their users, and counts outlive shards."""

import math
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.access.rules import AllowList, AllowRule, Peer
from shardcache.cache.listings.manifests import ListingLimits, Manifests, shards_of_row
from shardcache.cache.planner import Planner
from shardcache.cache.scrubber import ScrubProgress
from shardcache.cache.versions.history import FetchedVersion, History
from shardcache.errors import NotAllowedError, ProtocolError
from shardcache.shared.lists.shard_columns import Shards
from shardcache.shared.protocol import ShardRef
from shardcache.store.keys import shard_key
from shardcache.store.shard import Facts
from support.shards.stores import open_store, publish


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
    assert planner.key("url") == key
    assert planner.checked_at_s("url") == len(learned) - 1
    assert {each: planner.names(each) for each in names} == names
    planner.forget(key)
    assert planner.key("url") == "url"
    assert planner.checked_at_s("url") == float("-inf")


def test_old_names_of_missing_shards_are_forgotten() -> None:
    """However many are asked for, only the newest answers are kept, and those of cached shards."""
    names = Planner({"key0"}, remembered=10)
    for number in range(1000):
        names.learn(f"url{number}", f"key{number}", 1.0)
        names.learn_size(f"url{number}", 5)
    assert "11 remembered" in repr(names) or "10 remembered" in repr(names)
    assert names.key("url0") == "key0"
    assert names.names("key0") == {"key0", "url0"}
    assert names.key("url1") == "url1"
    assert names.names("key1") == {"key1"}
    assert names.key("url999") == "key999"
    assert names.size_bytes("url999") == 5


def manifests(memory_bytes: int = 10**6) -> Manifests:
    """Return lists for users who may all fetch s3://open/; only user 1 may s3://closed/."""
    rules = [AllowRule(prefix="s3://open/"), AllowRule(prefix="s3://closed/", uids=frozenset({1}))]
    nobody = cast(Any, None)
    return Manifests(
        nobody, nobody, nobody, nobody, AllowList(rules), ListingLimits(1.0, memory_bytes)
    )


async def test_a_fingerprint_is_no_door() -> None:
    """A fingerprint works only for users who sent the shards and so may fetch them."""
    known = manifests()
    for place, refused in (("open", False), ("closed", True)):
        shards = Shards.of([ShardRef(f"s3://{place}/a.tar", "v1"), ShardRef(f"s3://{place}/b.tar")])
        pair = [Shards.of([ref]) for ref in shards]
        for piece in (shards, *pair):
            await known.admit(piece.packed, Peer(1))
        assert await known.known([shards.fingerprint], Peer(2)) is None
        with pytest.raises(NotAllowedError) if refused else nullcontext():
            await known.admit(shards.packed, Peer(2))
        first, second = [await known.known([shards.fingerprint], Peer(uid)) for uid in (1, 2)]
        pieces = await known.known([each.fingerprint for each in pair], Peer(1))
        assert pieces is not None
        assert pieces.shards == shards
        assert first is not None
        assert first.names == [shard_key(shards[0].url, "v1"), shards[1].url]
        assert second is (None if refused else first), "equal lists are one"


async def test_lists_that_no_plan_names_take_bounded_memory() -> None:
    """The oldest lists are forgotten, and the latest stays, whatever its size."""
    known = manifests(200_000)
    lists = [Shards.of([ShardRef(f"s3://open/{number}.tar")]) for number in range(100)]
    for shards in lists:
        await known.admit(shards.packed, Peer(1))
    kept = [await known.known([shards.fingerprint], Peer(1)) is not None for shards in lists]
    assert kept == sorted(kept)
    assert 5 < sum(kept) < 60
    assert await known.known([lists[-1].fingerprint] * 10, Peer(1)) is not None
    assert await known.known([lists[-1].fingerprint] * 1000, Peer(1)) is None


@pytest.mark.parametrize("cut", [0, 10, -20])
def test_packed_shards_are_the_same_or_refused(cut: int) -> None:
    """Any facts in any characters pass; a pack cut off or too large is refused."""
    shards = Shards.of(
        [
            ShardRef("s3://b/ü.tar", "v", 1, 2, 3),
            ShardRef("s3://b/b.tar"),
            ShardRef("c", None, 0, 0, 0),
        ]
    )
    assert Shards.unpack(shards.packed) == shards
    assert list(shards)[::2] == [shards[0], shards[-1]]
    assert Shards.joined([Shards.of([]), *(Shards.of([ref]) for ref in shards)]) == shards
    for packed in (shards.packed[:cut], Shards.of([]).packed):
        with pytest.raises(ProtocolError, match="not a list of shards"):
            Shards.unpack(packed)
    with pytest.raises(ProtocolError, match="too large"):
        Shards.unpack(shards.packed, max_bytes=100)


@pytest.fixture
async def known(tmp_path: Path) -> AsyncIterator[History]:
    store = open_store(tmp_path)
    found = History(store)
    await found.remember(Facts("s3://b/a.tar", "v1", 2048, 2048, 1024, (1, 2), samples=10))
    yield found
    store.close()


async def test_a_count_belongs_to_its_version(known: History) -> None:
    """It fills in what has that version or none, and never another; a count that is there stays."""
    refs = [
        ShardRef("s3://b/a.tar", "v1", 2048),
        ShardRef("s3://b/a.tar"),
        ShardRef("s3://b/a.tar", "v2"),
        ShardRef("s3://b/a.tar", "v1", 2048, 7),
        ShardRef("s3://b/b.tar", "v1"),
    ]
    assert [ref.samples for ref in await known.fill(Shards.of(refs))] == [10, 10, None, 7, None]


@pytest.mark.parametrize(
    "row",
    [
        None,
        {},
        [],
        "row",
        5,
        [1, 2],
        ["v1", "10"],
        ["v1", True],
        ["v1", -1],
        ["v1", 2**63],
        ["\ud800", 1],
    ],
)
async def test_row_of_another_form_is_restored_from_the_sidecar(
    tmp_path: Path, row: object
) -> None:
    """The sidecar gives a cached shard's facts at once; other shards' facts are unknown."""
    store = open_store(tmp_path)
    await publish(store, "s3://b/a.tar", version="v1", samples=10)
    urls = ["s3://b/a.tar", "s3://b/gone.tar"]
    for url in urls:
        await store.catalogue.put(row, "shard", url)
    history = History(store)
    found = await history.fill(Shards.of(map(ShardRef, urls)))
    assert [ref.samples for ref in found] == [10, None]
    assert await history.versions(urls) == ["v1", None]
    store.close()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(2**70),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)
listings = st.text(alphabet="eJxAB+/=\u00e9", max_size=40) | st.binary(max_size=80).map(
    lambda data: b64encode(zlib.compress(data)).decode()
)


@pytest.mark.slow
@given(values | st.tuples(values, values).map(list))
def test_any_row_is_a_version_with_a_count_or_a_value_error(row: object) -> None:
    """The version and count fit the columns of a list of shards, and the version is text."""
    try:
        found = FetchedVersion.from_row(row)
    except ValueError:
        return
    assert found.version.encode() is not None
    samples = Shards.of([ShardRef("s3://b/a.tar", found.version, None, found.samples)])[0].samples
    assert samples == found.samples


@given(values | listings)
def test_any_row_is_a_listing_or_a_value_error(row: object) -> None:
    """Only a whole list of shards, with one shard or more, is taken for one."""
    try:
        found = shards_of_row(row)
    except ValueError:
        return
    assert len(found) > 0


@given(st.tuples(st.just("") | st.just("a" * 32) | values, values, values).map(list) | values)
def test_any_row_is_a_position_of_the_scrubber_that_a_status_can_show(row: object) -> None:
    """Its times are numbers of JSON, and a pause can be reckoned from them."""
    found = ScrubProgress.from_row(row)
    assert math.isfinite(found.begun_s + (found.ended_s or 0.0))


async def test_a_manifest_of_any_length_is_one_question(known: History) -> None:
    """The known shard is found among more than a statement's 32,766 parameters."""
    refs = [ShardRef(f"s3://b/{number}.tar") for number in range(40_000)]
    filled = await known.fill(Shards.of([*refs, ShardRef("s3://b/a.tar")]))
    assert len(filled) == 40_001
    assert filled[-1].samples == 10
    assert filled[0].samples is None
