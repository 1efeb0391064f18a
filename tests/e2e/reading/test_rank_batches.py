"""Batches by number, from a real daemon: the same for any number of threads, from any batch on, despite bad data."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import DecodeError, NotFoundError, ShardError
from shardcache_client import ShardDataset, ignore_and_continue, ignore_and_stop
from shardcache_client.batches.rank_batches import BatchForm, RankBatches
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.order.deal import SpanDeal
from shardcache_client.order.rounds import Topology
from shardcache_client.position.progress import Progress
from shardcache_client.reading.place_reader import SampleForm
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of
from support.shards.tars import BATCH, COUNTS, Make, write_indexed

THREADS = [0, 1, 3]
Keys = list[list[str]]


class Read:
    """The batches of a dataset's rank, as keys of their samples."""

    def __init__(self, dataset: ShardDataset[Any], progress: Progress | None = None, rank: int = 0, ranks: int = 1):
        settings = dataset._settings
        assert isinstance(settings.deal, SpanDeal)
        form = SampleForm(settings.manifest, settings.pipeline.view, settings.handover)
        self._dataset = dataset
        self._settings = settings
        self.batches = RankBatches(
            settings.deal,
            form,
            settings.pipeline,
            progress or Progress(),
            Topology(rank, ranks),
            BatchForm(BATCH, drop_last=False, collate=keys_of),
        )

    def __call__(self, *, skip: int = 0, threads: int = 0) -> Iterator[list[str]]:
        reader = ReaderIdentity("job")
        return self.batches.read(self._settings.sessions, reader, self._dataset._on_error, skip=skip, threads=threads)


@pytest.fixture(params=THREADS, ids=lambda threads: f"{threads} threads")
def threads(request: pytest.FixtureRequest) -> int:
    """A number of threads."""
    number: int = request.param
    return number


@pytest.mark.parametrize("options", [{"shuffle": False}, {}, {"samples_per_epoch": 100}, {"shuffle_window": 0}])
def test_batches_are_those_of_the_loader(make: Make, options: dict[str, Any], threads: int) -> None:
    """In the same order, one epoch after another."""
    dataset = make(**options)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        expected = list(dataset.loader(batch_size=BATCH, num_workers=0, collate_fn=keys_of))
        assert list(Read(dataset, Progress(epoch))(threads=threads)) == expected


def test_global_batches_are_those_of_the_loader(make: Make, threads: int) -> None:
    """Each rank's part of them."""
    dataset = make(batch_size=1, global_batch_size=2 * BATCH, canonical_nodes=2)
    whole = list(Read(dataset)(threads=threads))
    parts = [Read(dataset, rank=rank, ranks=2)(threads=threads) for rank in range(2)]
    together = [one + other for one, other in zip(*parts, strict=True)]
    dataset.set_epoch(0)
    assert together == list(dataset.loader(num_workers=0, collate_fn=keys_of))
    assert [key for batch in whole for key in batch] == [key for batch in together for key in batch]


def test_reading_begins_at_any_batch(make: Make, threads: int) -> None:
    """With what follows there, and nothing of what comes before."""
    dataset = make()
    whole = list(Read(dataset)())
    for skip in (0, 1, 5, len(whole) - 1, len(whole)):
        assert list(Read(dataset)(skip=skip, threads=threads)) == whole[skip:]
        resumed = Progress().after(1, BATCH, skip)
        assert list(Read(dataset, resumed)(threads=threads)) == whole[skip:]


def test_other_ranks_read_the_rest(make: Make, threads: int) -> None:
    """Of two ranks that have taken three batches each, three ranks read what is left, and each sample comes once."""
    dataset = make(even="drop")
    first = [list(islice(Read(dataset, rank=rank, ranks=2)(threads=threads), 3)) for rank in range(2)]
    progress = Progress().after(2, BATCH, 3)
    rest = [list(Read(dataset, progress, rank, 3)(threads=threads)) for rank in range(3)]
    read = Counter(key for rank in first + rest for batch in rank for key in batch)
    assert max(read.values()) == 1
    assert sum(COUNTS) - read.total() < 3


# What is bad


def spoilt(folder: Path) -> str:
    """Write shards of which one is gone, and return their index."""
    index = write_indexed(folder, [6] * 5)
    (folder / "2.tar").unlink()
    return index


def test_substitutes_are_the_same_for_any_threads(daemon: Daemon, tmp_path: Path) -> None:
    """A lost shard, and samples that a function refuses: batches keep their size, and are equal from run to run."""
    index = spoilt(tmp_path)

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] in ("000003", "000020"):
            raise ValueError("no image")
        return sample

    def read(threads: int, skip: int = 0) -> Keys:
        dataset = ShardDataset(
            index, shuffle=True, seed=3, socket=daemon.socket, decode=decode, on_error=ignore_and_continue
        )
        return list(Read(dataset)(threads=threads, skip=skip))

    whole = read(0)
    assert [len(batch) for batch in whole] == [BATCH] * 7 + [2]
    counts = Counter(key for batch in whole for key in batch)
    assert len(counts) == 22, "all samples but the 6 lost and the 2 refused"
    assert read(3) == read(1) == whole
    assert read(2, skip=4) == whole[4:]


def test_skipped_samples_and_shards_are_counted_once(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    """However often a substitute was looked for."""
    seen: list[Exception] = []

    def note(exn: Exception) -> bool:
        seen.append(exn)
        return True

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] >= "000020":
            raise ValueError("no image")
        return sample

    dataset = ShardDataset(spoilt(tmp_path), socket=daemon.socket, decode=decode, on_error=note)
    list(Read(dataset)(threads=threads))
    assert "skipped 1 shards, and 10 samples of other shards" in caplog.text
    assert Counter(map(type, seen)) == {NotFoundError: 1, DecodeError: 10}


def test_errors_come_in_the_place_of_their_batch(daemon: Daemon, tmp_path: Path, threads: int) -> None:
    """Whoever makes it; those before it are yielded."""
    dataset = ShardDataset(spoilt(tmp_path), socket=daemon.socket)
    batches = Read(dataset)(threads=threads)
    assert len([*islice(batches, 3)]) == 3
    with pytest.raises(NotFoundError):
        next(batches)


def test_a_handler_can_end_the_epoch(daemon: Daemon, tmp_path: Path, threads: int) -> None:
    """With the good samples before the error."""
    dataset = ShardDataset(spoilt(tmp_path), socket=daemon.socket, on_error=ignore_and_stop)
    assert [len(batch) for batch in Read(dataset)(threads=threads)] == [BATCH, BATCH, BATCH]


def test_data_without_any_good_sample_is_an_error(daemon: Daemon, tmp_path: Path, threads: int) -> None:
    """Found after each place was tried once, even in an endless epoch's first batch."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no image")

    options: dict[str, Any] = {"socket": daemon.socket, "decode": decode, "on_error": ignore_and_continue}
    dataset = ShardDataset(write_indexed(tmp_path, [3, 4]), **options)
    with pytest.raises(ShardError, match="none of the 7 samples"):
        next(Read(dataset)(threads=threads))


@pytest.mark.parametrize("drop", [list.clear, list.pop], ids=["cleared", "popped"])
def test_no_thread_or_session_outlives_a_dropped_iterator(
    make: Make, daemon: Daemon, drop: Callable[[list[Any]], Any], threads: int
) -> None:
    """Nor a lease."""
    before = threading.active_count()
    held = [Read(make())(threads=threads)]
    next(held[0])
    drop(held)
    assert threading.active_count() == before
    eventually(lambda: daemon.leases() == 0, limit_s=10)
