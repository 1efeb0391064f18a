"""workers="auto": processes make the first batches, and threads the others if the lock has room."""

import logging
import multiprocessing
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import DecodeError
from shardcache_client import ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.shards.tars import BATCH, Make, write_indexed

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(
        not getattr(sys, "_is_gil_enabled", lambda: True)(),
        reason="this Python has no global lock to be watched",
    ),
]

COUNTS = (2000, 2000, 2000)
"""Numbers of samples of the shards of an epoch that nobody reads to its end."""

LONG = sum(COUNTS)

Batch = list[tuple[int, str]]
Data = ShardDataset[Any]
Loader = ShardLoader[Batch]
Log = pytest.LogCaptureFixture


def holding(sample: dict[str, Any]) -> tuple[int, str]:
    """Return process and key, after holding the global lock for some milliseconds."""
    sum(range(200_000))
    return os.getpid(), sample["__key__"]


def waiting(sample: dict[str, Any]) -> tuple[int, str]:
    """Return process and key, after some milliseconds without the global lock."""
    time.sleep(0.004)
    return os.getpid(), sample["__key__"]


def key_of(sample: dict[str, Any]) -> tuple[int, str]:
    """Return process and key."""
    return os.getpid(), sample["__key__"]


def is_odd(sample: dict[str, Any]) -> bool:
    """Return True for every other sample."""
    return int(sample["__key__"]) % 2 == 1


def auto(dataset: Data, **options: Any) -> Loader:
    """Return a loader that chooses its workers."""
    return dataset.loader(num_workers=2, workers="auto", collate_fn=list, **options)


def makers(*batches: Batch) -> set[int]:
    """Return the processes that have made batches."""
    return {process for process, _ in chain(*batches)}


def keys(batches: list[Batch]) -> list[list[str]]:
    """Return the keys of each batch."""
    return [[key for _, key in batch] for batch in batches]


def first_keys(dataset: Data, count: int) -> list[list[str]]:
    """Return the keys of the first batches that this process makes."""
    loader = dataset.map(key_of).loader(num_workers=0, collate_fn=list)
    return keys(list(islice(loader, count)))


def up_to_threads(batches: Iterator[Batch], further: int = 0) -> list[Batch]:
    """Take batches until threads have made some."""
    taken = []
    for batch in batches:
        taken.append(batch)
        if makers(batch) == {os.getpid()}:
            break
    return [*taken, *islice(batches, further)]


@pytest.fixture
def info(caplog: Log) -> Log:
    """The log, from the level on at which the choice is named."""
    caplog.set_level(logging.INFO, "shardcache")
    return caplog


def choices(info: Log) -> list[str]:
    """Return the messages that name a choice of workers."""
    return [message for message in info.messages if message.startswith("workers=")]


def running() -> set[str]:
    """Return the names of the loaders' threads."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("shardcache-")}


@pytest.fixture(scope="module")
def long_index(folder: Path) -> str:
    """The index file of some large shards."""
    return write_indexed(folder / "long", COUNTS)


@pytest.fixture
def long(make: Make, long_index: str) -> Data:
    """A dataset with a long epoch."""
    return make(long_index)


@pytest.mark.slow
@pytest.mark.parametrize("is_numbered", [True, False], ids=["numbered", "filtered"])
def test_threads_go_on_where_processes_end(long: Data, info: Log, *, is_numbered: bool) -> None:
    """In the middle of the epoch, with the very next batch, if functions do without the lock."""
    dataset = long if is_numbered else long.filter(is_odd)
    batches = iter(auto(dataset.map(waiting)))
    taken = up_to_threads(batches, further=20)
    assert makers(*taken[-20:]) == {os.getpid()}
    assert os.getpid() not in makers(taken[0])
    assert keys(taken) == first_keys(dataset, len(taken))
    (message,) = choices(info)
    assert "the loader's workers are threads" in message


@pytest.mark.slow
def test_processes_stay_for_functions_that_hold_the_lock(long: Data, info: Log) -> None:
    """The log says so, once there is enough to say it."""
    taken = []
    for batch in auto(long.map(holding)):
        taken.append(batch)
        if choices(info):
            break
    assert os.getpid() not in makers(*taken)
    assert keys(taken) == first_keys(long, len(taken))
    (message,) = choices(info)
    assert "the loader's workers are processes" in message


@pytest.mark.slow
def test_processes_stay_for_a_loop_that_holds_the_lock(long: Data, info: Log) -> None:
    """Threads would have to wait for it, and it for them."""
    taken = []
    for batch in auto(long.map(waiting)):
        taken.append(batch)
        sum(range(600_000))
        if choices(info):
            break
    (message,) = choices(info)
    assert "the loader's workers are processes" in message


@pytest.fixture
def chosen(long: Data) -> Loader:
    """A loader that has chosen threads."""
    loader = auto(long.map(waiting))
    up_to_threads(iter(loader), further=1)
    return loader


def test_choice_holds_for_later_epochs_and_for_copies(chosen: Loader, info: Log) -> None:
    """It is made and logged once for each loader."""
    copy = pickle.loads(pickle.dumps(chosen))
    assert makers(*islice(chosen, 5)) == {os.getpid()}
    assert makers(*islice(copy, 5)) == {os.getpid()}
    assert choices(info) == []


@pytest.mark.slow
def test_worker_processes_end_when_threads_are_chosen(long: Data) -> None:
    """They hold memory, and shards."""
    batches = iter(auto(long.map(waiting)))
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    up_to_threads(batches)
    assert multiprocessing.active_children() == []


End = Callable[[Any], object]


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(bool, marks=pytest.mark.slow),
        next,
        pytest.param(lambda batches: batches.close(), marks=pytest.mark.slow),
    ],
)
def test_abandoned_iterator_ends_its_threads_and_processes(long: Data, end: End) -> None:
    """Neither threads nor processes, whichever made the last batch, and in between."""
    before = running()
    for taken in (1, 3):
        batches = iter(auto(long.map(waiting), prefetch_factor=4))
        list(islice(batches, taken))
        end(batches)
        del batches
    for further in (0, 3):
        batches = iter(auto(long.map(waiting), prefetch_factor=4))
        up_to_threads(batches, further)
        end(batches)
        del batches
    assert running() <= before
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [pytest.param(ValueError("no image"), marks=pytest.mark.slow), KeyboardInterrupt()],
    ids=repr,
)
def test_failed_loop_ends_its_threads_and_processes(long: Data, error: BaseException) -> None:
    """Or with Ctrl-C, once the error is dealt with."""
    before = running()

    def loop() -> None:
        batches = iter(auto(long.map(waiting)))
        up_to_threads(batches)
        next(batches)
        raise error

    with pytest.raises(type(error)):
        loop()
    error.__traceback__ = None
    assert running() <= before
    assert multiprocessing.active_children() == []


def test_error_in_a_chosen_thread_comes_where_its_batch_would_have_come(
    long: Data,
) -> None:
    """After all batches of the processes."""
    trainer = os.getpid()

    def fail_in_threads(sample: dict[str, Any]) -> tuple[int, str]:
        if os.getpid() == trainer:
            raise ValueError("no image")
        return waiting(sample)

    taken: list[Batch] = []
    with pytest.raises(DecodeError, match="no image"):
        taken.extend(auto(long.map(fail_in_threads)))
    assert 0 < len(taken) < LONG // BATCH
    assert keys(taken) == first_keys(long, len(taken))


@pytest.mark.slow
def test_state_from_before_and_after_the_choice_resumes_with_the_next_batch(
    long: Data,
) -> None:
    """It says nothing of workers."""
    loader = auto(long.map(waiting))
    batches = iter(loader)
    taken = [next(batches), next(batches)]
    early = loader.state_dict()
    taken += up_to_threads(batches, further=1)
    late = loader.state_dict()
    expected = first_keys(long, len(taken) + 3)
    for state, first in ((early, 2), (late, len(taken))):
        resumed = auto(long.map(waiting))
        resumed.load_state_dict(state)
        assert keys(list(islice(resumed, 3))) == expected[first : first + 3]


@pytest.mark.slow
def test_a_loader_forks_its_processes_while_none_of_its_threads_runs(long: Data) -> None:
    """A lock that it held would stay held in them for ever."""
    seen: list[set[str]] = []
    os.register_at_fork(before=lambda: seen.append(running()))
    before = running()
    up_to_threads(iter(auto(long.map(waiting))), further=3)
    assert len(seen) >= 2
    assert set().union(*seen) <= before


@pytest.mark.slow
def test_loaders_side_by_side_choose_for_themselves(long: Data, info: Log) -> None:
    """Each gets its own batches."""
    one = iter(auto(long.map(waiting)))
    other = iter(auto(long.map(holding)))
    of_one: list[Batch] = []
    of_other: list[Batch] = []
    while len(choices(info)) < 2:
        of_one.append(next(one))
        of_other.append(next(other))
    assert keys(of_one) == first_keys(long, len(of_one))
    assert keys(of_other) == keys(of_one)
    assert os.getpid() not in makers(*of_other)


@pytest.mark.slow
def test_loader_in_a_thread_chooses_as_elsewhere(long: Data) -> None:
    """The thread ends with what it has read."""
    found: list[Batch] = []

    def read() -> None:
        found.extend(up_to_threads(iter(auto(long.map(waiting))), further=2))

    before = running()
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert makers(*found[-2:]) == {os.getpid()}
    assert keys(found) == first_keys(long, len(found))
    assert running() <= before


def read_some(loader: Loader, results: Connection) -> None:
    """Send the keys of some batches, and whether this process has made them."""
    batches = list(islice(loader, 5))
    results.send((keys(batches), makers(*batches) == {os.getpid()}))


@pytest.mark.slow
def test_loader_in_a_forked_process_keeps_the_choice(chosen: Loader, long: Data) -> None:
    """Its own threads make the batches, of the next epoch."""
    long.set_epoch(1)
    expected = first_keys(long, 5)
    context = multiprocessing.get_context("fork")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=read_some, args=(chosen, sender))
    process.start()
    assert results.recv() == (expected, True)
    process.join()


def set_up(worker: int) -> None:
    """Set nothing up."""


OPTIONS = [
    {"worker_init_fn": set_up},
    pytest.param({"persistent_workers": True}, marks=pytest.mark.slow),
    pytest.param({"timeout": 60}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_processes_choose_processes(make: Make, info: Log, option: Any) -> None:
    """They would have no effect on threads."""
    batches = list(auto(make().map(key_of), **option))
    assert os.getpid() not in makers(*batches)
    (message,) = choices(info)
    assert message.endswith(f"the loader's workers are processes, as {next(iter(option))} is given")


def test_loader_without_workers_chooses_nothing(make: Make, info: Log) -> None:
    """The training's own thread makes the batches."""
    threads: set[int] = set()
    dataset = make().map(lambda sample: threads.add(threading.get_ident()))
    list(dataset.loader(num_workers=0, workers="auto", collate_fn=list))
    assert threads == {threading.get_ident()}
    assert choices(info) == []
