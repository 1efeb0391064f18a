"""Reading a shard while its rest is still on its way, from a store under the test's control."""

import gc
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ShardChangedError, TruncatedShardError
from shardcache_client.dataset import ShardDataset
from shardcache_client.indexed import IndexedShards
from shardcache_client.reader import ShardReader
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.reading import keys_of, write_index
from support.shards.tars import make_tar, random_samples
from support.stores.canary import GatedStore

PART_BYTES = 64 * 1024
SAMPLES = 100
WRITTEN = random_samples(SAMPLES, {"bin": 9_000})
BODY = make_tar(WRITTEN)  # a megabyte: 16 parts
FIVE_PARTS = 5 * PART_BYTES  # 33 samples, and the beginning of another
KEYS = [f"{number:06d}" for number in range(SAMPLES)]

Samples = IndexedShards[dict[str, Any]]


@pytest.fixture
def store() -> Iterator[GatedStore]:
    """A store that holds everything back."""
    with GatedStore() as running:
        yield running


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that fetches in small parts."""
    flags = ("--part-size", str(PART_BYTES), "--shard-connections", "4", "--attempts", "1")
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as name,
        Daemon(Path(name), *flags) as running,
    ):
        yield running


@pytest.fixture
def indexed(store: GatedStore, tmp_path: Path) -> str:
    """The index file of a shard that is held back."""
    return write_index(tmp_path, [SAMPLES], store.put("a.tar", BODY))


def next_keys(samples: Iterator[dict[str, Any]], count: int) -> list[str]:
    """Return the keys of the next samples."""
    return keys_of(islice(samples, count))


def transfer(daemon: Daemon) -> dict[str, Any]:
    """Return the only transfer under way, or nothing."""
    transfers: list[dict[str, Any]] = daemon.status()["transfers"]
    return transfers[0] if transfers else {}


@contextmanager
def reading(read: Callable[[], Any]) -> Iterator[list[Any]]:
    """Read in another thread until its end; the list gets what was read, once all is there."""
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(read()))
    reader.start()
    yield found
    reader.join()


def test_the_first_samples_come_with_the_first_parts(daemon: Daemon, store: GatedStore) -> None:
    """Five parts of sixteen give what lies in them. The rest follows, every byte right."""
    url = store.put("a.tar", BODY)
    samples = iter(ShardDataset(url, socket=daemon.socket))
    store.let("a.tar", FIVE_PARTS)
    assert next_keys(samples, 30) == KEYS[:30]
    assert not daemon.shards(), "nothing is published yet"
    store.let("a.tar")
    assert keys_of(samples) == KEYS[30:]
    again = [sample["bin"] for sample in ShardDataset(url, socket=daemon.socket)]
    assert again == [sample["bin"] for sample in WRITTEN]
    assert daemon.status()["counters"]["origin_bytes"] == len(BODY)


@pytest.mark.slow
def test_the_first_samples_come_with_the_beginning_of_the_first_part(store: GatedStore) -> None:
    """A part larger than a batch is read as it is written, and every byte is right."""
    written = random_samples(60, {"bin": 100_000})
    url = store.put("a.tar", make_tar(written))
    store.bytewise = True
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as name,
        Daemon(Path(name), "--attempts", "1") as daemon,
    ):
        samples = iter(ShardDataset(url, socket=daemon.socket))
        store.let("a.tar", 3 * 1024 * 1024)
        assert next_keys(samples, 20) == KEYS[:20]
        assert transfer(daemon)["done_bytes"] < 3.1 * 1024 * 1024
        store.let("a.tar")
        assert [sample["bin"] for sample in samples] == [sample["bin"] for sample in written[20:]]
        assert daemon.status()["counters"]["origin_bytes"] == len(make_tar(written))


@pytest.mark.slow
def test_chosen_samples_wait_for_the_whole_shard(
    daemon: Daemon, store: GatedStore, indexed: str
) -> None:
    """The index that finds them comes last, even if they are read in file order."""
    dataset = ShardDataset(indexed, socket=daemon.socket).subset(range(0, SAMPLES, 7))
    with reading(lambda: keys_of(dataset)) as found:
        store.let("a.tar", FIVE_PARTS)
        eventually(lambda: transfer(daemon).get("done_bytes", 0) >= 4 * PART_BYTES)
        store.let("a.tar")
    assert found == [KEYS[::7]]


@pytest.mark.slow
def test_a_dataset_that_read_what_arrived_ends_its_session_with_its_last_reference(
    daemon: Daemon, store: GatedStore, indexed: str
) -> None:
    """The garbage collector would come later, and the daemon fetch for an epoch that never begins.

    With the number of samples known, the last is left to the index, and the walk through what
    arrives never ends.
    """
    gc.collect()
    gc.disable()
    try:
        dataset = ShardDataset(indexed, socket=daemon.socket)
        samples = iter(dataset)
        store.let("a.tar", FIVE_PARTS)
        assert next_keys(samples, 30) == KEYS[:30]
        store.let("a.tar")
        assert keys_of(samples) == KEYS[30:]
        assert daemon.sessions() == 1
        del samples, dataset
        eventually(lambda: daemon.sessions() == 0)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partial_reads", "etags"), [pytest.param(False, True, marks=pytest.mark.slow), (True, False)]
)
def test_shard_is_read_whole_where_partial_reads_are_off_or_unsafe(
    daemon: Daemon, store: GatedStore, partial_reads: bool, etags: bool
) -> None:
    """Not to who opts out, and of no store that cannot guard each read against another version."""
    store.etag = None if etags else ""
    samples = iter(
        ShardDataset(store.put("a.tar", BODY), socket=daemon.socket, partial_reads=partial_reads)
    )
    with reading(lambda: next_keys(samples, 1)) as found:
        store.let("a.tar", FIVE_PARTS)
        eventually(lambda: transfer(daemon).get("done_bytes", 0) >= FIVE_PARTS)
        assert transfer(daemon)["waiters"] == 1
        assert found == []
        store.let("a.tar")
    assert [*found[0], *keys_of(samples)] == KEYS


CUT = BODY[: 12 * PART_BYTES]


@pytest.mark.slow
def test_a_lease_that_has_the_number_of_an_ended_one_is_left_alone(
    daemon: Daemon, store: GatedStore
) -> None:
    """A reader that waits for more of a released shard keeps its newer lease after an error."""
    bad = store.put("bad.tar", random.Random(1).randbytes(len(BODY)))
    good = store.put("good.tar", BODY)
    store.let("good.tar")
    with RawSession(daemon) as session:
        session.plan([good], [0])
        session.take(0)
    eventually(lambda: daemon.leases() == 0)
    store.let("bad.tar", FIVE_PARTS)
    with RawSession(daemon) as session:
        session.plan([bad, good], [0, 1])
        session.send(type="lease", id=100, position=0, partial=True)
        session.send(type="need", of=100)
        assert session.receive()["type"] == "arriving"
        session.send(type="more", id=101, lease=100, beyond=len(BODY))
        session.send(type="release", lease=100)
        session.send(type="lease", id=100, position=1)
        session.send(type="need", of=100)
        assert session.receive()["type"] == "leased"
        store.let("bad.tar")
        failure = session.receive()
        assert failure["type"] == "error"
        assert failure["id"] == 101
        assert daemon.leases() == 1
    eventually(lambda: daemon.leases() == 0)


def read(samples: Samples, *numbers: int) -> bool:
    """Return True if these samples are those that were written."""
    found = [(samples[number]["__key__"], samples[number]["bin"]) for number in numbers]
    return found == [(WRITTEN[number]["__key__"], WRITTEN[number]["bin"]) for number in numbers]


@pytest.mark.slow
def test_a_sample_is_read_once_it_has_arrived(
    indexed: str, daemon: Daemon, store: GatedStore
) -> None:
    """Any order does, or a selection. Only the last sample and those not there yet wait."""
    store.let("a.tar", FIVE_PARTS)
    samples = ShardReader(indexed, socket=daemon.socket).indexed()
    assert read(samples, 20, 3, 30, 0, 20)
    assert samples.subset(range(0, SAMPLES, 7))[4]["__key__"] == "000028"
    assert not daemon.shards(), "nothing is published yet"
    with reading(lambda: read(samples, 60, 99, 5)) as late:
        eventually(lambda: transfer(daemon).get("waiters") == 1)
        assert not late
        store.let("a.tar")
    assert late == [True]
    assert read(samples, *range(SAMPLES))
    assert daemon.status()["counters"]["origin_bytes"] == len(BODY)
    samples.close()
    eventually(lambda: daemon.leases() == 0)


@pytest.mark.slow
def test_a_shard_that_was_replaced_is_opened_again(
    indexed: str, daemon: Daemon, store: GatedStore
) -> None:
    """An error lies between samples of two versions, and says that there were some of the first."""
    store.let("a.tar", FIVE_PARTS)
    samples = ShardReader(indexed, socket=daemon.socket).indexed()
    assert read(samples, 20, 3)
    store.put("a.tar", make_tar([{**WRITTEN[0], "__key__": "new"}, *WRITTEN[1:]]))
    store.let("a.tar")
    with pytest.raises(ShardChangedError, match="samples had already been yielded") as caught:
        samples[80]
    assert caught.value.yielded == 4
    assert samples[0]["__key__"] == "new"
    assert read(samples, 80, 99)


@pytest.mark.slow
def test_a_shard_that_turns_out_damaged_is_an_error_of_its_remaining_samples(
    indexed: str, daemon: Daemon, store: GatedStore
) -> None:
    """Those read before stay given; a sample asked for later is never one of a corrupt shard."""
    store.put("a.tar", CUT)
    store.let("a.tar", FIVE_PARTS)
    samples = ShardReader(indexed, socket=daemon.socket).indexed()
    assert read(samples, 20)
    store.let("a.tar")
    for _ in range(2):
        with pytest.raises(TruncatedShardError):
            samples[90]
