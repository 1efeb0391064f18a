"""A store that misbehaves, a little of each: `make faults` does the same thousands of times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from campaign import store
from campaign.harness import QUICK, Result, Row, rows
from campaign.store_place import StorePlace
from shardcache.errors import CorruptShardError, OriginUnavailableError
from support.stores.mischief import Mischief


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorePlace]:
    """A store, a proxy before it and a daemon, for the module."""
    with store.ground(tmp_path_factory.mktemp("p"), QUICK) as place:
        yield place


@pytest.fixture
def result(place: StorePlace) -> Iterator[Result]:
    """The result of a test that begins with an empty cache, and leaves a store that works."""
    place.evict()
    result = Result("one test's")
    yield result
    place.proxy.heal()
    assert not result.first_failure


@rows(store.ROWS)
def test_misbehaving_store_gives_right_shards_or_typed_errors(row: Row, place: StorePlace) -> None:
    """Whatever is wrong with its answers; and every shard comes once the store is healed."""
    row.check(place)


@pytest.mark.parametrize("mischief", [Mischief.CHUNKED, Mischief.ENCODED], ids=lambda mischief: mischief.name.lower())
def test_rare_answers_that_http_allows_are_read(mischief: Mischief, place: StorePlace, result: Result) -> None:
    """They cost no shard and no second try."""
    place.proxy.fail(mischief)
    assert place.read(result) == []
    assert place.proxy.done[mischief]


def test_another_objects_bytes_under_the_right_headers_are_noticed(place: StorePlace, result: Result) -> None:
    """By the store's checksum where it has one, by the ETag where that is an MD5; none of them is served."""
    place.proxy.fail(Mischief.OTHER_BYTES)
    failures = place.read(result)
    assert {failure.number for failure in failures} == set(range(len(place.urls)))
    assert {type(failure.error) for failure in failures} == {CorruptShardError}
    assert {"MD5" if "MD5" in str(failure.error) else "crc32" for failure in failures} == {"MD5", "crc32"}
    place.recover(result, failures)


def test_dripping_store_is_an_error_in_the_end(place: StorePlace, result: Result) -> None:
    """Bytes that come one by one, for hours if allowed to, do not keep a reader waiting."""
    place.proxy.fail(Mischief.DRIP)
    failures = place.read(result, [0])
    assert isinstance(failures[0].error, OriginUnavailableError)
    place.recover(result, failures)


def test_status_counts_hedged_requests(place: StorePlace) -> None:
    """They stand with the other counters."""
    counters = place.daemon.status()["counters"]
    assert counters["origin_bytes"] >= counters["hedged_bytes"] >= 0 <= counters["hedges"]


def test_bodies_pass_through_the_proxy(place: StorePlace) -> None:
    """Uploads through the proxy arrive as sent, signature and all: it changes only what it is told to."""
    body = bytes(range(256)) * 1000
    place.store_through_proxy("through.tar", body)
    assert place.stored("through.tar") == body
