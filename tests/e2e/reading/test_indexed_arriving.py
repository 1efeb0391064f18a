"""`dataset.indexed()` of a shard that is on its way: a sample is read as soon as it is there."""

from __future__ import annotations

import gc
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ShardChangedError, TruncatedShardError
from shardcache_client import ShardReader
from shardcache_client.indexed import IndexedShards
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, random_samples
from support.stores.gated_store import GatedStore

PART_BYTES = 64 * 1024
SAMPLES = 100
WRITTEN = random_samples(SAMPLES, {"bin": 9_000})
BODY = make_tar(WRITTEN)  # a megabyte: 16 parts
FIVE_PARTS = 5 * PART_BYTES  # 33 samples, and the beginning of another

Samples = IndexedShards[dict[str, Any]]
Make = Callable[..., Samples]


@pytest.fixture
def store() -> Iterator[GatedStore]:
    """A store with one shard, of which it holds everything back."""
    with GatedStore() as running:
        running.put("a.tar", BODY)
        yield running


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that fetches in small parts."""
    with tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as name:
        flags = ("--part-size", str(PART_BYTES), "--shard-connections", "4", "--attempts", "1")
        with Daemon(Path(name), *flags) as running:
            yield running


@pytest.fixture
def make(daemon: Daemon, store: GatedStore, tmp_path: Path) -> Make:
    """A function that returns the samples of the shard, by number."""
    index = tmp_path / "index.json"
    row = {"url": store.put("a.tar", BODY), "nsamples": SAMPLES}
    index.write_text(json.dumps({"wids_version": 1, "shardlist": [row]}))

    def make_samples(**options: Any) -> Samples:
        return ShardReader(f"file://{index}", socket=daemon.socket, **options).indexed()

    return make_samples


def read(samples: Samples, *numbers: int) -> bool:
    """Return True if these samples are those that were written."""
    found = [(samples[number]["__key__"], samples[number]["bin"]) for number in numbers]
    return found == [(WRITTEN[number]["__key__"], WRITTEN[number]["bin"]) for number in numbers]


def test_a_sample_is_read_once_it_has_arrived(make: Make, daemon: Daemon, store: GatedStore) -> None:
    """In any order, also those of a selection; the last one, and what is behind what has come, wait for it."""
    store.let("a.tar", FIVE_PARTS)
    samples = make()
    assert read(samples, 20, 3, 30, 0, 20)
    assert samples.subset(range(0, SAMPLES, 7))[4]["__key__"] == "000028"
    assert not daemon.shards(), "nothing is published yet"
    late: list[bool] = []
    reader = threading.Thread(target=lambda: late.append(read(samples, 60, 99, 5)))
    reader.start()
    eventually(lambda: daemon.status()["transfers"][0]["waiters"] == 1)
    assert not late
    store.let("a.tar")
    reader.join()
    assert late == [True]
    assert read(samples, *range(SAMPLES))
    assert daemon.status()["counters"]["origin_bytes"] == len(BODY)
    samples.close()
    eventually(lambda: daemon.leases() == 0)


def test_samples_of_what_arrived_end_their_session_with_their_last_reference(
    make: Make, daemon: Daemon, store: GatedStore
) -> None:
    """Not when the garbage collector comes."""
    gc.collect()
    gc.disable()
    try:
        store.let("a.tar", FIVE_PARTS)
        samples = make()
        assert read(samples, 20)
        assert daemon.sessions() == 1
        del samples
        eventually(lambda: daemon.sessions() == 0)
    finally:
        gc.enable()


def test_without_partial_reads_no_sample_comes_before_the_whole(make: Make, daemon: Daemon, store: GatedStore) -> None:
    """Not even the first."""
    samples, found = make(partial_reads=False), []
    reader = threading.Thread(target=lambda: found.append(read(samples, 0)))
    reader.start()
    store.let("a.tar", FIVE_PARTS)
    eventually(lambda: daemon.status()["transfers"] and daemon.status()["transfers"][0]["done_bytes"] >= FIVE_PARTS)
    assert (daemon.status()["transfers"][0]["waiters"], found) == (1, [])
    store.let("a.tar")
    reader.join()
    assert found == [True]


def test_a_shard_that_was_replaced_is_opened_again(make: Make, store: GatedStore) -> None:
    """An error lies between samples of two versions, and says that there were some of the first."""
    store.let("a.tar", FIVE_PARTS)
    samples = make()
    assert read(samples, 20, 3)
    store.put("a.tar", make_tar([{**WRITTEN[0], "__key__": "new"}, *WRITTEN[1:]]))
    store.let("a.tar")
    with pytest.raises(ShardChangedError, match="samples had already been yielded") as caught:
        samples[80]
    assert caught.value.yielded == 4
    assert samples[0]["__key__"] == "new"
    assert read(samples, 80, 99)


def test_a_shard_that_turns_out_damaged_is_an_error_of_its_remaining_samples(make: Make, store: GatedStore) -> None:
    """Those read before stay given; a sample asked for later is never one of a corrupt shard."""
    store.put("a.tar", BODY[: 12 * PART_BYTES])
    store.let("a.tar", FIVE_PARTS)
    samples = make()
    assert read(samples, 20)
    store.let("a.tar")
    for _ in range(2):
        with pytest.raises(TruncatedShardError):
            samples[90]


def test_a_daemon_killed_while_samples_are_read(make: Make, daemon: Daemon, store: GatedStore) -> None:
    """The next one goes on with the parts that are there, and the same numbers are the same samples."""
    store.let("a.tar", FIVE_PARTS)
    samples = make()
    assert read(samples, 20)
    eventually(lambda: daemon.status()["transfers"][0]["done_bytes"] >= FIVE_PARTS)
    daemon.restart()
    store.let("a.tar")
    assert read(samples, 90, 20, 99)
    assert daemon.status()["counters"]["origin_bytes"] < len(BODY)
