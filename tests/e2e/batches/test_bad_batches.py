"""Batches over bad data: the same for any number of threads, equal in size, each error once."""

import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ConfigError, DecodeError, NotFoundError, ShardError
from shardcache_client import batch_by_length, ignore_and_continue, ignore_and_stop
from shardcache_client.dataset import ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.cases import first_quick
from support.programs.daemon import Daemon, eventually
from support.shards.reading import keys_of
from support.shards.tars import BATCH, Make, write_indexed

Batches = list[list[str]]


def load(dataset: ShardDataset[Any], threads: int) -> ShardLoader[list[str]]:
    """Return a loader of lists of keys, with so many threads or none to make its batches."""
    return dataset.loader(
        batch_size=BATCH, num_workers=threads, workers="threads", collate_fn=keys_of
    )


@pytest.fixture(params=first_quick([3, 0, 1]), ids=lambda threads: f"{threads} threads")
def threads(request: pytest.FixtureRequest) -> int:
    """A number of threads."""
    number: int = request.param
    return number


def spoilt(folder: Path) -> str:
    """Write shards of which one is gone, and return their index."""
    index = write_indexed(folder, [6] * 5)
    (folder / "2.tar").unlink()
    return index


@pytest.mark.slow
def test_substitutes_are_the_same_for_any_threads(daemon: Daemon, tmp_path: Path) -> None:
    """Batches keep their size, and are equal from run to run, despite a lost shard."""
    index = spoilt(tmp_path)

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] in ("000003", "000020"):
            raise ValueError("no image")
        return sample

    def read(threads: int, skip: int = 0) -> Batches:
        dataset = ShardDataset(
            index,
            shuffle=True,
            seed=3,
            socket=daemon.socket,
            decode=decode,
            on_error=ignore_and_continue,
        )
        loader = load(dataset, threads)
        loader.skip(skip)
        return list(loader)

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
    list(load(dataset, threads))
    assert "skipped 1 shards, and 10 samples of other shards" in caplog.text
    assert Counter(map(type, seen)) == {NotFoundError: 1, DecodeError: 10}


WAYS: dict[str, Callable[[ShardDataset[Any], int], Any]] = {
    "batches": load,
    "samples": lambda dataset, _: dataset,
    "batches of a filter": lambda dataset, threads: load(dataset.filter(bool), threads),
    "samples of a filter": lambda dataset, _: dataset.filter(bool),
    "blocks": lambda dataset, _: dataset.pack(1, length=lambda _: 1),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_loop_that_is_left_logs_what_it_has_skipped(
    daemon: Daemon,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    threads: int,
    way: Callable[[ShardDataset[Any], int], Any],
) -> None:
    """Few warnings say that the number follows, as in a loop that is read to its end."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] < "000002":
            raise ValueError("no image")
        return sample

    dataset = ShardDataset(
        write_indexed(tmp_path, [6] * 5),
        socket=daemon.socket,
        decode=decode,
        on_error=ignore_and_continue,
    )
    taken = iter(way(dataset, threads))
    assert len([*islice(taken, 2)]) == 2
    assert "skipped" not in caplog.text
    taken.close()
    assert "epoch 0: skipped 0 shards, and 2 samples of other shards" in caplog.text


def test_stage_that_is_left_logs_what_it_has_refused(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Samples that fit into no block, and those that fit into no batch."""

    def length(sample: dict[str, Any]) -> int:
        return 9 if sample["__key__"] < "000002" else 1

    options: dict[str, Any] = {"length": length, "on_error": ignore_and_continue}
    dataset = ShardDataset(write_indexed(tmp_path, [6] * 5), socket=daemon.socket)
    for groups in (dataset.pack(1, **options), batch_by_length(dataset, 1, **options)):
        caplog.clear()
        taken = iter(groups)
        assert next(taken)
        taken.close()
        assert "epoch 0: skipped 2 samples longer than max_tokens" in caplog.text


def test_ranks_of_which_one_had_an_empty_batch_are_out_of_step(
    daemon: Daemon, tmp_path: Path, threads: int
) -> None:
    """Uneven ranks leave bad samples out, and only the states of all of them are exact."""
    url = write_indexed(tmp_path, [BATCH] * 6)
    (tmp_path / "0.tar").unlink()

    def rank(number: int) -> ShardLoader[list[str]]:
        options: dict[str, Any] = {
            "even": None,
            "on_error": ignore_and_continue,
            "socket": daemon.socket,
        }
        return load(ShardDataset(url, rank=number, world_size=2, **options), threads)

    loaders = [rank(number) for number in range(2)]
    taken = [list(islice(loader, 2)) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    other = rank(1)
    with pytest.raises(ConfigError, match="the states of some ranks do not say"):
        other.load_state_dict(states[0])
        list(other)
    read = Counter(key for batches in taken for batch in batches for key in batch)
    for number in range(2):
        resumed = rank(number)
        resumed.load_state_dict(states)
        read.update(key for batch in resumed for key in batch)
    assert read == dict.fromkeys([f"{number:06d}" for number in range(BATCH, 6 * BATCH)], 1)


def test_errors_come_in_the_place_of_their_batch(
    daemon: Daemon, tmp_path: Path, threads: int
) -> None:
    """Whoever makes it; those before it are yielded."""
    dataset = ShardDataset(spoilt(tmp_path), socket=daemon.socket)
    batches = iter(load(dataset, threads))
    assert len([*islice(batches, 3)]) == 3
    with pytest.raises(NotFoundError):
        next(batches)


def test_a_handler_can_end_the_epoch(daemon: Daemon, tmp_path: Path, threads: int) -> None:
    """With the good samples before the error."""
    dataset = ShardDataset(spoilt(tmp_path), socket=daemon.socket, on_error=ignore_and_stop)
    assert [len(batch) for batch in load(dataset, threads)] == [BATCH, BATCH, BATCH]


def test_data_without_any_good_sample_is_an_error(
    daemon: Daemon, tmp_path: Path, threads: int
) -> None:
    """Found after each place was tried once, even in an endless epoch's first batch."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no image")

    options: dict[str, Any] = {
        "socket": daemon.socket,
        "decode": decode,
        "on_error": ignore_and_continue,
    }
    dataset = ShardDataset(write_indexed(tmp_path, [3, 4]), **options)
    with pytest.raises(ShardError, match="rank 0 cannot read any sample in epoch 0"):
        next(iter(load(dataset, threads)))


def test_epoch_without_any_good_sample_is_empty_where_they_are_left_out(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    """A rank may have none in its part; the log says how many were skipped, in each epoch."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no image")

    options: dict[str, Any] = {"socket": daemon.socket, "decode": decode, "even": None}
    dataset = ShardDataset(write_indexed(tmp_path, [3, 4]), on_error=ignore_and_continue, **options)
    loader = load(dataset, threads)
    for epoch in range(2):
        assert list(loader) == []
        assert f"epoch {epoch}: skipped 0 shards, and 7 samples of other shards" in caplog.text


@pytest.mark.parametrize("drop", [list.clear, list.pop], ids=["cleared", "popped"])
def test_a_dropped_iterator_leaves_no_thread_session_or_lease(
    make: Make, daemon: Daemon, drop: Callable[[list[Any]], Any], threads: int
) -> None:
    """It is ended wherever its last reference goes, with one batch taken."""
    before = threading.active_count()
    held = [iter(load(make(), threads))]
    next(held[0])
    drop(held)
    assert threading.active_count() == before
    eventually(lambda: daemon.leases() == 0)


@pytest.mark.slow
def test_substitutes_are_of_shards_that_are_open(daemon: Daemon, tmp_path: Path) -> None:
    """Shard after shard is not opened for good samples where most samples are bad."""
    index = write_indexed(tmp_path, [100] * 8)

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["__key__"]) % 10:
            raise ValueError("no image")
        return sample

    dataset = ShardDataset(
        index,
        shuffle=True,
        shuffle_window=4,
        seed=3,
        job="open",
        socket=daemon.socket,
        decode=decode,
        on_error=ignore_and_continue,
    )
    found = [key for batch in load(dataset, 0) for key in batch]
    assert len(found) == 800
    assert set(found) == {f"{number:06d}" for number in range(0, 800, 10)}
    shards_read = sum(
        job["shards_done"] for job in daemon.status()["jobs"] if job["name"] == "open"
    )
    assert shards_read < 800


def test_sample_that_cannot_be_pickled_is_an_error(daemon: Daemon, tmp_path: Path) -> None:
    """A worker process cannot send it, and the trainer gets the error without waiting."""
    dataset = ShardDataset(write_indexed(tmp_path, [6]), socket=daemon.socket)

    def spoil(sample: dict[str, Any]) -> Any:
        return threading.Lock() if sample["__key__"] == "000005" else sample

    batches = iter(
        dataset.map(spoil).loader(batch_size=2, num_workers=1, workers="processes", collate_fn=list)
    )
    assert keys_of(next(batches)) == ["000000", "000001"]
    assert keys_of(next(batches)) == ["000002", "000003"]
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        next(batches)
