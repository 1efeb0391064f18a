"""`dataset.indexed()` with a table of samples: only the wanted samples' bytes are fetched."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError, OutdatedError, SampleKeyError, ShardChangedError
from shardcache_client.dataset import ShardDataset
from shardcache_client.indexed import IndexedShards
from shardcache_client.reader import ShardReader
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, random_samples
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 64 * KIB
SHARDS = 6
PER_SHARD = 40
SIZES = {"jpg": 100 * KIB, "json": 700}
SAMPLES = [random_samples(PER_SHARD, SIZES, first=shard * PER_SHARD) for shard in range(SHARDS)]
ALL: list[Any] = [sample for samples in SAMPLES for sample in samples]
TARS = [make_tar(samples) for samples in SAMPLES]


@dataclass(frozen=True)
class Dataset:
    """A dataset in a store, with an index and a table of its samples."""

    store: Canary
    daemon: Daemon

    def shard_requests(self) -> int:
        """Return the number of requests for shards so far."""
        return sum(path.endswith(".tar") for path in self.store.paths)

    def reader(self, **options: Any) -> ShardReader[Any]:
        return ShardReader(self.store.url("/index.json"), socket=self.daemon.socket, **options)

    def indexed(self, window: int = 4, **options: Any) -> IndexedShards[Any]:
        return self.reader(**options).indexed(window)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The index of the shards and the table of their samples, as the command makes them."""
    folder = tmp_path_factory.mktemp("tables")
    with Canary() as store, Daemon(folder) as daemon:
        for number, tar in enumerate(TARS):
            store.files[f"/{number}.tar"] = tar
        urls = [store.url(f"/{number}.tar") for number in range(SHARDS)]
        ran = shardcache(
            "index", *urls, "-o", folder / "index.json", "--samples", socket=daemon.socket
        )
        assert ran.code == 0, ran.err
        index = (folder / "index.json").read_text().replace(store.url("/"), "")
    return {
        "/index.json": index.encode(),
        "/index.samples": (folder / "index.samples").read_bytes(),
    }


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon for the whole module."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000")
    with Daemon(tmp_path_factory.mktemp("d"), *flags) as running:
        yield running


@pytest.fixture
def data(node: Daemon, tables: dict[str, bytes]) -> Iterator[Dataset]:
    """The dataset in a store of its own, by urls of which the daemon has cached nothing."""
    with Canary() as store:
        store.files |= tables
        for number, tar in enumerate(TARS):
            store.files[f"/{number}.tar"] = tar
        yield Dataset(store, node)


def content(sample: Any) -> dict[str, Any]:
    """Return a sample without its url."""
    return {name: value for name, value in sample.items() if name != "__url__"}


def test_scattered_samples_are_fetched_alone(data: Dataset) -> None:
    """Of each shard the parts that have them, at any numbers, each sample whole."""
    numbers = [7, 101, 239, 60, 0, 7]
    with data.indexed() as samples:
        assert [content(sample) for sample in samples[numbers]] == [
            ALL[number] for number in numbers
        ]
        assert content(samples[150]) == ALL[150]
    assert data.store.asked_bytes(".tar") <= 6 * 4 * PART_BYTES
    eventually(lambda: data.daemon.leases() == 0)


def test_samples_that_are_read_again_come_from_disk(data: Dataset) -> None:
    """The store is asked for nothing more, by another reader either."""
    with data.indexed() as samples:
        assert content(samples[42]) == ALL[42]
    before = data.shard_requests()
    with data.indexed() as samples:
        assert content(samples[42]) == ALL[42]
    assert data.shard_requests() == before


def test_members_alone_are_fetched_alone(data: Dataset) -> None:
    """Of large samples a small member: no more than a part for each."""
    with data.indexed(members=("json",), decode=lambda sample: sample["json"]) as samples:
        assert samples[[20, 61, 100]] == [ALL[number]["json"] for number in (20, 61, 100)]
    assert data.store.asked_bytes(".tar") <= 3 * PART_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_is_read(data: Dataset, shuffle: bool) -> None:
    """Batches of workers have all samples in any order, with hardly a byte sent twice."""
    with data.indexed() as samples:
        loader: Any = DataLoader(
            samples,  # type: ignore[arg-type]
            batch_size=16,
            shuffle=shuffle,
            num_workers=2,
            collate_fn=list,
        )
        found = sorted(
            (content(sample) for batch in loader for sample in batch),
            key=lambda sample: sample["__key__"],
        )
    assert found == ALL
    assert data.store.asked_bytes(".tar") < sum(map(len, TARS)) * 3 / 2


def test_shard_that_is_read_in_order_is_held(data: Dataset) -> None:
    """It is mapped, as is one that was cached before; other samples are read by their ranges."""
    with data.indexed(window=2) as samples:
        for number in range(PER_SHARD):
            assert content(samples[number]) == ALL[number]
        assert "held=[0]" in repr(samples)
        assert content(samples[5 * PER_SHARD]) == ALL[5 * PER_SHARD]
        assert "held=[0]" in repr(samples)


@pytest.mark.slow
def test_cached_shards_are_read_by_everyone(data: Dataset) -> None:
    """Shards that a training run has cached are not fetched again."""
    assert len(list(data.reader())) == len(ALL)
    before = data.shard_requests()
    with data.indexed(window=2) as samples:
        numbers = random.Random(3).sample(range(len(ALL)), len(ALL))
        assert [content(samples[number]) for number in numbers] == [
            ALL[number] for number in numbers
        ]
    assert data.shard_requests() == before


@pytest.mark.slow
def test_threads_read_ranges_at_the_same_time(data: Dataset) -> None:
    """Each gets its samples."""
    numbers = random.Random(2).choices(range(len(ALL)), k=60)
    with data.indexed() as samples, ThreadPoolExecutor(6) as threads:
        assert list(map(content, threads.map(samples.__getitem__, numbers))) == [
            ALL[number] for number in numbers
        ]


def test_samples_are_found_by_their_keys(data: Dataset) -> None:
    """One, or a list of keys and numbers; each is fetched alone."""
    with data.indexed() as samples:
        assert content(samples["000201"]) == ALL[201]
        assert [content(sample) for sample in samples[["000003", 5, "000199"]]] == [
            ALL[3],
            ALL[5],
            ALL[199],
        ]
    assert data.store.asked_bytes(".tar") <= 4 * 4 * PART_BYTES


def test_unknown_key_is_an_error_that_names_near_ones(data: Dataset) -> None:
    """It is a KeyError; a key of a sample that was left out is unknown, too."""
    with (
        data.indexed() as samples,
        pytest.raises(KeyError, match=r"no sample has the key '00020l'; near it are '0002"),
    ):
        samples["00020l"]
    some = data.indexed().subset(range(10, 20))
    assert content(some["000012"]) == ALL[12]
    with pytest.raises(SampleKeyError, match="no sample has the key '000030'"):
        some["000030"]


def test_selections_are_read_by_ranges(data: Dataset) -> None:
    """Numbers are those of the chosen samples."""
    some = data.reader().subset([5, 77, 150]).indexed()
    assert [content(sample) for sample in some] == [ALL[5], ALL[77], ALL[150]]
    assert data.store.asked_bytes(".tar") <= 3 * 4 * PART_BYTES


def test_replaced_shard_is_an_error(data: Dataset) -> None:
    """Of another version, nothing is read by the table."""
    data.store.files["/1.tar"] = make_tar(random_samples(PER_SHARD, SIZES, first=1000))
    with data.indexed() as samples:
        assert content(samples[0]) == ALL[0]
        with pytest.raises((OutdatedError, ShardChangedError)):
            samples[PER_SHARD]
        assert content(samples[1]) == ALL[1]


@pytest.mark.slow
def test_table_of_other_shards_is_an_error(data: Dataset, tmp_path: Path) -> None:
    """It says which command writes both files again."""
    other = make_tar(random_samples(PER_SHARD, SIZES, first=1000))
    data.store.files["/1.tar"] = other
    urls = [data.store.url(f"/{number}.tar") for number in range(SHARDS)]
    ran = shardcache(
        "index", *urls, "-o", tmp_path / "new.json", "--samples", socket=data.daemon.socket
    )
    assert ran.code == 0, ran.err
    data.store.files["/index.samples"] = (tmp_path / "new.samples").read_bytes()
    with data.indexed() as samples:
        assert content(samples[0]) == ALL[0]
        with pytest.raises(ConfigError, match="the table of samples does not match the index file"):
            samples[PER_SHARD]


def test_bytes_that_are_not_the_sample_are_an_error(data: Dataset) -> None:
    """A table that names the right version and wrong places; samples at other places are read."""
    table = data.store.files["/index.samples"]
    assert b'"blocks":[204,204,' in table
    data.store.files["/index.samples"] = table.replace(b'"blocks":[204,204,', b'"blocks":[203,205,')
    with data.indexed() as samples:
        assert content(samples[5]) == ALL[5]
        with pytest.raises(ConfigError, match="are not the sample that it lists there"):
            samples[1]
        assert content(samples[2]) == ALL[2]


def test_dataset_without_a_table_is_read_by_shards(data: Dataset) -> None:
    """As ever; a key cannot be looked up."""
    del data.store.files["/index.samples"]
    with data.indexed() as samples:
        assert content(samples[100]) == ALL[100]
        with pytest.raises(ConfigError, match="found by their keys in a table"):
            samples["000001"]
    assert data.store.asked_bytes(".tar") == len(TARS[2])


@pytest.mark.slow
def test_a_daemon_that_restarts_goes_on(data: Dataset) -> None:
    """With the same session, at other shards than before."""
    with data.indexed() as samples:
        assert content(samples[200]) == ALL[200]
        data.daemon.kill()
        data.daemon.start()
        assert [content(sample) for sample in samples[[0, 130, 200]]] == [
            ALL[0],
            ALL[130],
            ALL[200],
        ]


@pytest.mark.slow
def test_compressed_and_odd_shards_are_read_whole(tmp_path: Path, daemon: Daemon) -> None:
    """A table says no places in them, and samples are the same."""
    import gzip

    (tmp_path / "0.tar.gz").write_bytes(gzip.compress(make_tar(SAMPLES[0][:5])))
    (tmp_path / "1.tar").write_bytes(make_tar(SAMPLES[1][:5]))
    ran = shardcache(
        "index", f"{tmp_path}/", "-o", tmp_path / "index.json", "--samples", socket=daemon.socket
    )
    assert ran.code == 0, ran.err
    with ShardDataset(f"{tmp_path}/index.json", socket=daemon.socket).indexed() as samples:
        assert [content(sample) for sample in samples[[3, 6]]] == [SAMPLES[0][3], SAMPLES[1][1]]
        assert content(samples["000042"]) == SAMPLES[1][2]
    eventually(lambda: daemon.leases() == 0)
