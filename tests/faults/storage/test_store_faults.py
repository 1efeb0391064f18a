"""A store that misbehaves, a little of each: `make faults` does the same thousands of times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign import store
from campaign.result import Result
from campaign.store.place import StorePlace
from shardcache.errors import CorruptShardError, OriginUnavailableError
from support.disks.shim import HAS_CC
from support.stores.mischief import Mischief

SHARDS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorePlace]:
    """A store, a proxy before it and a daemon, for the module."""
    with StorePlace(tmp_path_factory.mktemp("p"), SHARDS) as place:
        store.begin(place)
        yield place


@pytest.fixture
def result(place: StorePlace) -> Iterator[Result]:
    """Where a test counts that begins with an empty cache; it leaves a store that works."""
    place.evict()
    yield Result(store.PART, "one test's")
    place.proxy.heal()


@pytest.mark.parametrize("mischief", list(Mischief), ids=lambda mischief: mischief.name.lower())
def test_a_right_shard_or_a_typed_error(mischief: Mischief, place: StorePlace) -> None:
    """Whatever is wrong with half of the answers; and every shard comes once the store is healed."""
    result = store.one_kind(place, mischief, 1)
    assert result.passed, result.first_failure


@pytest.mark.parametrize("mischief", [Mischief.CHUNKED, Mischief.ENCODED], ids=lambda mischief: mischief.name.lower())
def test_what_a_store_may_send_is_read(mischief: Mischief, place: StorePlace, result: Result) -> None:
    """Answers that HTTP allows, however rare, cost no shard and no second try."""
    place.proxy.fail(mischief)
    assert place.read(result) == []
    assert place.proxy.done[mischief]
    assert not result.first_failure


def test_tars_with_data_behind_their_end_are_errors(place: StorePlace) -> None:
    """With a hole of zeros in the middle, or a second tar: whole or as they arrive; mended, they come."""
    result = store.trailing(place, 1)
    assert result.passed, result.first_failure


def test_a_store_that_hangs_keeps_no_cached_shard_from_its_readers(place: StorePlace) -> None:
    """Several readers of cached shards, of which each is checked with the store first."""
    result = store.hanging(place, 1)
    assert result.passed, result.first_failure


def test_idle_connections_that_died_silently_cost_no_shard(place: StorePlace) -> None:
    """All of them at once, between two readings."""
    result = store.forgotten(place, 1)
    assert result.passed, result.first_failure


def test_what_is_asked_over_tls_comes_so_or_not_at_all(place: StorePlace, tmp_path: Path) -> None:
    """Certificates that nobody trusts, connections cut within a record, redirects to plain HTTP."""
    for result in store.behind_tls(place, tmp_path, 1):
        assert result.passed, result.first_failure


@pytest.mark.skipif(not HAS_CC, reason="needs a C compiler")
def test_a_silent_first_address_costs_no_shard(place: StorePlace) -> None:
    """A daemon, on its own event loop and resolver, reads and lists a store of which it finds the second address."""
    result = store.silent_first(place, 1)
    assert result.passed, result.first_failure


def test_everything_at_once_does_no_harm(place: StorePlace) -> None:
    """Answers spoiled in all ways at random."""
    result = store.all_kinds(place, 20)
    assert result.passed, result.first_failure


def test_a_listing_is_whole_or_an_error(place: StorePlace) -> None:
    """A prefix stands for all of its shards, or for none and a reason."""
    result = store.listings(place, 10)
    assert result.passed, result.first_failure


def test_samples_that_are_read_as_they_arrive_are_right(place: StorePlace) -> None:
    """Every sample once, or an error that names the shard; what failed comes later."""
    result = store.dataset(place, 10)
    assert result.passed, result.first_failure


def test_what_is_replaced_between_two_ranges_is_read_whole(place: StorePlace) -> None:
    """Of one version or the other, and of the new one as soon as it is asked for again."""
    result = store.replaced(place, SHARDS)
    assert result.passed, result.first_failure


def test_another_objects_bytes_under_the_right_headers_are_noticed(place: StorePlace, result: Result) -> None:
    """By the store's checksum where it has one, by the ETag where that is an MD5; none of them is served."""
    place.proxy.fail(Mischief.OTHER_BYTES)
    failures = place.read(result)
    assert {failure.number for failure in failures} == set(range(SHARDS))
    assert {type(failure.error) for failure in failures} == {CorruptShardError}
    found = {"MD5" if "MD5" in str(failure.error) else "crc32" for failure in failures}
    assert found == {"MD5", "crc32"}
    place.recover(result, failures)
    assert not result.first_failure


def test_a_store_that_only_drips_is_an_error_in_the_end(place: StorePlace, result: Result) -> None:
    """Bytes that come one by one, for hours if one let them, do not keep a reader waiting."""
    place.proxy.fail(Mischief.DRIP)
    failures = place.read(result, [0])
    assert isinstance(failures[0].error, OriginUnavailableError)
    place.recover(result, failures)
    assert not result.first_failure


def test_status_counts_what_was_asked_twice(place: StorePlace) -> None:
    """Beside the other counters."""
    counters = json.loads(place.daemon.request("GET", "/v1/status"))["counters"]
    assert counters["origin_bytes"] >= counters["hedged_bytes"] >= 0 <= counters["hedges"]


def test_bodies_pass_through_the_proxy(place: StorePlace) -> None:
    """Uploads through the proxy arrive as sent, signature and all: it changes what it is told to, no more."""
    body = bytes(range(256)) * 1000
    place.store_through_proxy("through.tar", body)
    assert place.stored("through.tar") == body
