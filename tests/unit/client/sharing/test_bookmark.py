"""bookmark.py: which epoch is read from where, as loaders and training loops begin, load and set it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache_client.order.partition import Partition
from shardcache_client.order.progress import Phase
from shardcache_client.order.state import Place, ReaderState, Resumption, resume
from shardcache_client.sharing.bookmark import Bookmark, Iteration
from shardcache_client.sharing.epoch import WorkerPlace
from shardcache_client.sharing.shared_state import SharedState
from shardcache_client.topology import Topology

CUT = Partition(1, 2)
EPOCH = 4


@pytest.fixture
def bookmark() -> Bookmark:
    """That of a dataset that was just made."""
    return Bookmark(SharedState(), {True: "train", False: "train"})


def saved(reader: int, **fields: Any) -> dict[str, Any]:
    """Return the state of a worker of two in the middle of an epoch."""
    place = Place(taken=10 + reader, given=10 + reader)
    return ReaderState(
        **{"dataset": "train", "epoch": EPOCH, "cut": CUT, "reader": reader, "place": place} | fields
    ).to_json()


def forked(bookmark: Bookmark) -> list[Bookmark]:
    """Return what two workers have of it: their own, but for the board."""
    return [copy.copy(bookmark), copy.copy(bookmark)]


def begun(bookmark: Bookmark, place: WorkerPlace | None = None) -> Iteration:
    """Begin an iteration in a process, which takes a second batch of it, and reads it to its end."""
    iteration = Iteration()
    bookmark.begin(iteration, place)
    bookmark.count(iteration)
    bookmark.finish(iteration, place)
    return iteration


def begin(workers: list[Bookmark], loader: int) -> list[Resumption]:
    """Have a loader's workers read an iteration; return from where each reads."""
    iterations = [begun(each, WorkerPlace(loader, worker, len(workers))) for worker, each in enumerate(workers)]
    return [start(each, CUT, Topology(0, 1, worker, 2)) for worker, each in enumerate(iterations)]


def start(iteration: Iteration, cut: Partition, topology: Topology) -> Resumption:
    """Return from where a reader reads its iteration."""
    assert all(state.epoch == iteration.epoch for state in iteration.states)
    return resume(iteration.states, cut, topology, 100) if iteration.states else Resumption(iteration.epoch)


def in_the_middle() -> list[Resumption]:
    """From where two workers go on whose states are `saved`."""
    return [Resumption(EPOCH, (), Place(taken=10 + reader, given=10 + reader)) for reader in range(2)]


def from_the_beginning(epoch: int) -> list[Resumption]:
    """From where two workers read an epoch that nobody has begun."""
    return [Resumption(epoch)] * 2


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_that_loads_its_workers(bookmark: Bookmark, persistent: bool) -> None:
    """As StatefulDataLoader does, unknown to the main process: each goes on, and then reads the next epoch."""
    workers = forked(bookmark)
    for number, worker in enumerate(workers):
        worker.load(saved(number), worker=True)
        assert worker.next_epoch == EPOCH, "asked at once for its state, it has the one that was loaded"
    assert begin(workers, 17) == in_the_middle()
    for epoch in (EPOCH + 1, EPOCH + 2):
        assert begin(workers if persistent else forked(bookmark), 17) == from_the_beginning(epoch)
    assert bookmark.next_epoch == EPOCH + 3


def test_a_look_leaves_a_loaded_state_to_the_next_iteration(bookmark: Bookmark) -> None:
    """With and without workers: it resumes there, and is followed by the next, which does, too."""
    bookmark.load([saved(0), saved(1)], worker=False)
    for place in (None, WorkerPlace(5, 0, 1)):
        look = Iteration()
        bookmark.begin(look, place)
        assert (look.epoch, [state.reader for state in look.states]) == (EPOCH, [0, 1])
    assert begin(forked(bookmark), 17) == in_the_middle()


def test_living_workers_hear_of_what_is_loaded(bookmark: Bookmark) -> None:
    """Persistent workers, which were started before, go on from the state that the main process loads."""
    workers = forked(bookmark)
    begin(workers, 1)
    bookmark.load([saved(0), saved(1)], worker=False)
    assert [found.place.taken for found in begin(workers, 1)] == [10, 11]
    assert [found.place.taken for found in begin(workers, 1)] == [0, 0]


def test_workers_that_load_and_begin_one_after_another(bookmark: Bookmark) -> None:
    """However far one is before the other even starts."""
    first, second = forked(bookmark)
    first.load(saved(0), worker=True)
    assert begun(first, WorkerPlace(17, 0, 2)).epoch == EPOCH
    second.load(saved(1), worker=True)
    assert begun(second, WorkerPlace(17, 1, 2)).epoch == EPOCH
    assert begin([first, second], 17) == from_the_beginning(EPOCH + 1)


@pytest.mark.parametrize("persistent", [True, False])
def test_what_the_main_process_loads(bookmark: Bookmark, persistent: bool) -> None:
    """Workers that are started afterwards take it along, for one epoch."""
    bookmark.load([saved(0), saved(1)], worker=False)
    workers = forked(bookmark)
    assert begin(workers, 17) == in_the_middle()
    assert begin(workers if persistent else forked(bookmark), 29) == from_the_beginning(EPOCH + 1)


def test_without_workers(bookmark: Bookmark) -> None:
    """The process itself goes on, and then reads the next epoch."""
    whole, place = Partition(1, 1), Place(taken=3, given=3)
    bookmark.load(saved(0, cut=whole, place=place), worker=False)
    assert bookmark.next_epoch == EPOCH
    starts = [start(begun(bookmark), whole, Topology()) for _ in range(2)]
    assert starts == [Resumption(EPOCH, (), place), Resumption(EPOCH + 1)]


def test_other_workers_than_before(bookmark: Bookmark) -> None:
    """The remainder follows from how far those before came."""
    bookmark.load([saved(0), saved(1)], worker=False)
    resumed = start(begun(bookmark), Partition(1, 1), Topology())
    assert resumed == Resumption(EPOCH, (Phase(CUT, (10, 11)),))


def test_set_epoch_keeps_the_place_within_its_own_epoch(bookmark: Bookmark) -> None:
    """A training loop names the epoch before it reads: the loaded one goes on, any other begins at its beginning."""
    bookmark.load([saved(0), saved(1)], worker=False)
    for epoch, starts in ((EPOCH, in_the_middle()), (EPOCH + 1, from_the_beginning(EPOCH + 1))):
        bookmark.set_epoch(epoch)
        assert begin(forked(bookmark), epoch) == starts


def test_another_epoch_than_the_loaded_one(bookmark: Bookmark) -> None:
    """Whoever sets it means it: the loaded place is not applied to it."""
    bookmark.load([saved(0), saved(1)], worker=False)
    bookmark.set_epoch(0)
    assert begin(forked(bookmark), 17) == from_the_beginning(0)


def test_what_is_loaded_last_holds(bookmark: Bookmark) -> None:
    """A state takes the place of the epoch that was set before, and of an earlier state."""
    bookmark.set_epoch(7)
    bookmark.load([saved(0, epoch=9), saved(1, epoch=9)], worker=False)
    assert bookmark.next_epoch == 9
    bookmark.load([saved(0), saved(1)], worker=False)
    assert begin(forked(bookmark), 17) == in_the_middle()


def test_a_loaded_state_is_used_once(bookmark: Bookmark) -> None:
    """A loop that names the same epoch before every pass, as for validation, reads the rest and then whole passes."""
    bookmark.load([saved(0), saved(1)], worker=False)
    for starts in (in_the_middle(), from_the_beginning(EPOCH), from_the_beginning(EPOCH)):
        bookmark.set_epoch(EPOCH)
        assert begin(forked(bookmark), 17) == starts


def test_an_epoch_that_is_set_after_workers_were_told_to_load(bookmark: Bookmark) -> None:
    """A training loop that names another epoch is obeyed, whoever loads later."""
    bookmark.set_epoch(EPOCH + 3)
    workers = forked(bookmark)
    for number, worker in enumerate(workers):
        worker.load(saved(number), worker=True)
    assert begin(workers, 17) == from_the_beginning(EPOCH + 3)
    assert bookmark.next_epoch == EPOCH + 3


def test_a_state_of_another_dataset(bookmark: Bookmark) -> None:
    """It is refused, and changes nothing."""
    with pytest.raises(ConfigError, match="another dataset"):
        bookmark.load(saved(0, dataset="validation"), worker=False)
    assert begun(bookmark).epoch == 0


def test_the_main_process_knows_who_reads(bookmark: Bookmark) -> None:
    """Number of workers of the last iteration: their positions are not those of the training loop."""
    assert bookmark.workers == 0
    begin(forked(bookmark), 17)
    assert bookmark.workers == 2
    begun(bookmark)
    assert bookmark.workers == 0
    begin(forked(bookmark), 31)
    bookmark.load(saved(0), worker=False)
    assert bookmark.workers == 0
