"""Two epochs from a store that is far away, with disk for half of the data: all samples permuted,
or a window.

Beside our two orders run LanceDB's `StreamingDataset`, which permutes all rows and keeps nothing on
disk, and MosaicML's `StreamingDataset` with its order "py1e". MosaicML downloads whole shards: its
block is a sixth of the data, so that the shards that it mixes, and those that it downloads ahead,
fit into its disk. Each has two workers, a step of a fixed length, the memory that it takes by
default, and its own client of S3.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

from benchmarks.data import Dataset, Kind
from benchmarks.downloads.cold import BATCH_SAMPLES, WORKERS, Course, loader_of, read_epoch
from benchmarks.measure import Row, call, interleaved, median_of
from benchmarks.peers import LANCEDB_TABLE, mosaicml
from benchmarks.workplace import Workplace
from support.programs.cli import shardcache
from support.stores.throttled_s3 import ThrottledS3

GLOBAL = "global"
WINDOW = "window of 8"
LANCEDB = "lancedb"
MOSAICML = "mosaicml py1e"
EPOCHS = 2
MOSAICML_BLOCKS = 6
_SEED = 7
# As the docs advise for samples of this size in a cache that does not hold all of them.
_PART_BYTES = "128KiB"
# A reader's window of eight shards is a small part of the data at any scale.
_KIND = Kind("permuted", "100 KB", (("jpg", 100_000),), 32 * 64 * 1024 * 1024, 8 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Epochs:
    """Outcome of the two epochs of a job."""

    cold: Course
    again: Course
    store_bytes: int

    @property
    def cold_percent(self) -> float:
        return self.cold.waiting_percent

    @property
    def again_percent(self) -> float:
        return self.again.waiting_percent

    @property
    def first_batch_s(self) -> float:
        return self.cold.first_batch_s

    @property
    def store_mb(self) -> float:
        return self.store_bytes / 1e6

    def __str__(self) -> str:
        return (
            f"waited {self.cold_percent:.1f} % of {self.cold.wall_s:.1f} s, "
            f"then {self.again_percent:.1f} % of {self.again.wall_s:.1f} s, "
            f"first batch after {self.first_batch_s:.2f} s, {self.store_mb:,.0f} MB from the store"
        )


def reading(place: Workplace) -> Iterator[Row]:
    """Yield waiting in both epochs, seconds to the first batch, and bytes from the store."""
    dataset = place.dataset(_KIND)
    peers = {LANCEDB: place.lancedb(_KIND), MOSAICML: place.mosaicml(_KIND)}
    for path in chain.from_iterable(folder.rglob("*") for folder in peers.values()):
        if path.is_file():
            path.read_bytes()  # a far store has disks of its own
    with place.far_store(dataset) as store:
        index = _index(place, dataset, store)
        contenders: dict[str, Callable[[], Epochs]] = {
            GLOBAL: partial(_ours, place, store, index, "global"),
            WINDOW: partial(_ours, place, store, index, True),
            LANCEDB: partial(_lancedb, place, store, peers[LANCEDB].name),
            MOSAICML: partial(_mosaicml, place, store, peers[MOSAICML].name),
        }
        tries = interleaved(contenders, place.say, place.rounds)
    yield from _rows(tries)


def _rows(tries: Mapping[str, Sequence[Epochs]]) -> Iterator[Row]:
    others = [name for name in tries if name != GLOBAL]
    for figure, unit, what in (
        (
            "cold_percent",
            "%",
            f"of a cold epoch of {_KIND.label} samples spent waiting, {WORKERS} workers",
        ),
        ("again_percent", "%", "of the second epoch spent waiting"),
        ("first_batch_s", "s", "to the first batch"),
        ("store_mb", "MB", "from the store, two epochs, disk for half of the data"),
    ):
        medians = median_of(tries, figure)
        for name in others:
            yield Row(unit, f"{what}, all permuted", medians[GLOBAL], name, medians[name])


def _disk_bytes(place: Workplace) -> int:
    return place.dataset(_KIND).tar_bytes // 2


# Ours


def _index(place: Workplace, dataset: Dataset, store: ThrottledS3) -> str:
    """Return the path of an index with a table of samples beside it."""
    index = place.root / "permuted-index" / "index.json"
    index.parent.mkdir(exist_ok=True)
    urls = f"s3://{dataset.folder.name}/{dataset.names}"
    with place.daemon(store=store) as daemon:
        ran = shardcache("index", urls, "-o", index, "--samples", socket=daemon.socket)
    if ran.code:
        raise RuntimeError(f"the shards cannot be indexed: {ran.err}")
    return str(index)


def _ours(
    place: Workplace, store: ThrottledS3, index: str, order: Literal["global"] | bool
) -> Epochs:
    capacity = f"{_disk_bytes(place)}"
    with place.daemon(capacity, store, range_part_size=_PART_BYTES) as daemon:
        return _trained(
            place, store, train_ours, socket=str(daemon.socket), index=index, order=order
        )


def train_ours(
    socket: str, index: str, samples: int, order: Literal["global"] | bool
) -> list[Course]:
    from shardcache_client.dataset import ShardDataset

    dataset = ShardDataset(
        index, shuffle=order, seed=_SEED, batch_size=BATCH_SAMPLES, epochs=EPOCHS, socket=socket
    )
    loader: Any = dataset.loader(num_workers=WORKERS, collate_fn=list)
    courses = []
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        courses.append(read_epoch(loader, samples, Course()))
    return courses


# The others


def _lancedb(place: Workplace, store: ThrottledS3, bucket: str) -> Epochs:
    return _trained(place, store, train_lancedb, url=f"s3://{bucket}")


def train_lancedb(url: str, samples: int) -> list[Course]:
    import multiprocessing
    from multiprocessing import forkserver

    import lancedb
    from lancedb.streaming import StreamingDataset
    from torch.utils.data import DataLoader

    # Its documentation advises against fork. No clock runs yet while the server imports what the
    # workers need.
    multiprocessing.set_forkserver_preload(["torch", "lancedb.streaming"])
    forkserver.ensure_running()
    table = lancedb.connect(url).open_table(LANCEDB_TABLE)
    courses = []
    for epoch in range(EPOCHS):
        dataset = StreamingDataset(table, num_splits=WORKERS, shuffle_seed=_SEED, epoch=epoch)
        loader: Any = DataLoader(
            dataset,
            batch_size=BATCH_SAMPLES,
            collate_fn=list,
            num_workers=WORKERS,
            multiprocessing_context="forkserver",
        )
        # Splits have the same length: one sample may be left out.
        courses.append(read_epoch(loader, samples - samples % WORKERS, Course()))
    return courses


def _mosaicml(place: Workplace, store: ThrottledS3, bucket: str) -> Epochs:
    with place.folder() as folder:
        return _trained(
            place,
            store,
            train_mosaicml,
            url=f"s3://{bucket}",
            folder=str(folder),
            disk_bytes=_disk_bytes(place),
        )


def train_mosaicml(url: str, folder: str, disk_bytes: int, samples: int) -> list[Course]:
    dataset = mosaicml().StreamingDataset(
        remote=url,
        local=folder,
        shuffle=True,
        shuffle_algo="py1e",
        shuffle_seed=_SEED,
        shuffle_block_size=samples // MOSAICML_BLOCKS,
        num_canonical_nodes=1,
        batch_size=BATCH_SAMPLES,
        cache_limit=disk_bytes,
    )
    # Its forked workers would share the connection on which it got the index, and read each other's
    # answers.
    for stream in dataset.streams:
        stream._downloader.clean_up()
    loader = loader_of(dataset)
    return [read_epoch(loader, samples, Course()) for _ in range(EPOCHS)]


def _trained(
    place: Workplace, store: ThrottledS3, train: Callable[..., list[Course]], **how: Any
) -> Epochs:
    before_bytes = store.stats().sent_bytes
    env = {**store.env(), "AWS_ALLOW_HTTP": "true"}  # the latter is LanceDB's
    cold, again = call(train, env, samples=place.dataset(_KIND).samples, **how)
    return Epochs(Course(**cold), Course(**again), store.stats().sent_bytes - before_bytes)
