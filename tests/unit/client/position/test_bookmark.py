"""bookmark.py: an iteration's workers read one epoch from its place, again after a look."""

import copy
import os
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from shardcache_client.position.bookmark import Bookmark
from shardcache_client.position.iterations import Iteration
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Reached, StagedState
from shardcache_client.position.state import SavedState
from shardcache_client.ranks.group import Epochs
from shardcache_client.sharing.epoch_counter import EpochCounter
from shardcache_client.stages.stage import Mark

EPOCH = 4


@pytest.fixture
def bookmark() -> Bookmark:
    """The bookmark of a dataset that was just made."""
    return Bookmark(EpochCounter(), Epochs())


class Repeated(Epochs):
    """The ranks' decision that an epoch which one of them has ended early is read again."""

    def epoch_after(self, ended: int, *, counted_next: int, is_held: bool = False) -> int:
        """Return the epoch that was ended early."""
        return ended


def saved(reader: int, **fields: Any) -> dict[str, Any]:
    """Return the state of a worker of two in the middle of an epoch."""
    progress = Progress(fields.pop("epoch", EPOCH))
    state = StagedState("0" * 16, progress, reader, 2, 2, Reached(Mark(10 + reader)), ended=False)
    return replace(state, **fields).to_json()


def forked(bookmark: Bookmark) -> list[Bookmark]:
    """Return what two workers have of it: their own, but for the shared count."""
    return [spawned(bookmark), spawned(bookmark)]


def spawned(bookmark: Bookmark) -> Bookmark:
    """Return what a worker has of it that is started now."""
    copied = copy.copy(bookmark)
    copied.__dict__.update(bookmark.__getstate__())
    return copied


def join(bookmark: Bookmark, *place: int) -> Iteration:
    """Begin an iteration, as a worker of a loader or alone."""
    iteration = Iteration(*place)
    bookmark.begin(iteration)
    return iteration


def begun(bookmark: Bookmark, *place: int) -> Iteration:
    """Begin an iteration, take a second batch of it, and read it to its end."""
    iteration = join(bookmark, *place)
    bookmark.make_main(iteration)
    bookmark.finish(iteration)
    return iteration


Start = tuple[int, int]
"""From where a worker reads: an epoch, and a place in it."""


def begin(workers: list[Bookmark], loader: int) -> list[Start]:
    """Have a loader's workers read an iteration; return from where each reads."""
    iterations = [begun(each, loader, worker, len(workers)) for worker, each in enumerate(workers)]
    return [start(each, worker) for worker, each in enumerate(iterations)]


def start(iteration: Iteration, worker: int) -> Start:
    """Return from where a worker reads its iteration."""
    assert all(state.epoch == iteration.epoch for state in iteration.states)
    return iteration.epoch, place_of(iteration.states, worker)


def place_of(states: Any, worker: int) -> int:
    """Return the place of a worker in some states, 0 if there are none."""
    found: list[SavedState] = [state for state in states if state.reader == worker]
    return found[0].reached.mark.place if found else 0  # type: ignore[union-attr]


IN_THE_MIDDLE = [(EPOCH, 10), (EPOCH, 11)]
"""From where two workers go on whose states are `saved`."""


def from_the_beginning(epoch: int) -> list[Start]:
    """From where two workers read an epoch that nobody has begun."""
    return [(epoch, 0)] * 2


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_that_loads_its_workers(bookmark: Bookmark, persistent: bool) -> None:
    """Each worker resumes, unknown to the main process, as with StatefulDataLoader."""
    workers = forked(bookmark)
    for number, worker in enumerate(workers):
        worker.load(saved(number), in_worker=True)
        assert worker.next_epoch == EPOCH, (
            "asked at once for its state, it has the one that was loaded"
        )
    assert begin(workers, 17) == IN_THE_MIDDLE
    for epoch in (EPOCH + 1, EPOCH + 2):
        assert begin(workers if persistent else forked(bookmark), 17) == from_the_beginning(epoch)
    assert bookmark.next_epoch == EPOCH + 3


def test_living_workers_hear_of_what_is_loaded(bookmark: Bookmark) -> None:
    """Persistent workers started before go on from the state that the main process loads."""
    workers = forked(bookmark)
    begin(workers, 1)
    bookmark.load([saved(0), saved(1)], in_worker=False)
    assert begin(workers, 1) == IN_THE_MIDDLE
    assert begin(workers, 1) == from_the_beginning(EPOCH + 1)


def test_workers_that_load_and_begin_one_after_another(bookmark: Bookmark) -> None:
    """However far one is before the other even starts."""
    first, second = forked(bookmark)
    first.load(saved(0), in_worker=True)
    assert begun(first, 17, 0, 2).epoch == EPOCH
    second.load(saved(1), in_worker=True)
    assert begun(second, 17, 1, 2).epoch == EPOCH
    assert begin([first, second], 17) == from_the_beginning(EPOCH + 1)


def test_set_epoch_keeps_the_place_within_its_own_epoch(bookmark: Bookmark) -> None:
    """The loaded epoch goes on when it is named; any other starts at its beginning."""
    bookmark.load([saved(0), saved(1)], in_worker=False)
    for epoch, starts in ((EPOCH, IN_THE_MIDDLE), (EPOCH + 1, from_the_beginning(EPOCH + 1))):
        bookmark.set_epoch(epoch)
        assert begin(forked(bookmark), epoch) == starts


def test_epoch_set_after_workers_were_asked_to_load(bookmark: Bookmark) -> None:
    """A training loop that names another epoch is obeyed, whoever loads later."""
    bookmark.set_epoch(EPOCH + 3)
    workers = forked(bookmark)
    for number, worker in enumerate(workers):
        worker.load(saved(number), in_worker=True)
    assert begin(workers, 17) == from_the_beginning(EPOCH + 3)
    assert bookmark.next_epoch == EPOCH + 3


def test_main_process_knows_the_readers(bookmark: Bookmark) -> None:
    """The last iteration's number of workers is known, but not their positions."""
    assert bookmark.workers == 0
    begin(forked(bookmark), 17)
    assert bookmark.workers == 2
    begun(bookmark)
    assert bookmark.workers == 0
    begin(forked(bookmark), 31)
    bookmark.load(saved(0), in_worker=False)
    assert bookmark.workers == 0


def epochs_of(workers: list[Bookmark], loader: int, order: list[int]) -> list[int]:
    """Start a loader's workers in an order, and return the epoch that each reads."""
    iterations = [join(workers[worker], loader, worker, len(order)) for worker in order]
    for bookmark, iteration in zip(workers, iterations, strict=True):
        bookmark.make_main(iteration)
        bookmark.finish(iteration)
    return [each.epoch for each in iterations]


def test_counted_iterations_read_one_epoch_after_another(bookmark: Bookmark) -> None:
    """A question for the next epoch takes none, and neither does a look."""
    assert [bookmark.next_epoch, bookmark.next_epoch] == [0, 0]
    assert [join(bookmark).epoch for _ in range(3)] == [0, 0, 0]
    assert [begun(bookmark).epoch for _ in range(3)] == [0, 1, 2]
    assert bookmark.next_epoch == 3


def test_workers_that_begin_at_any_time_read_the_same_epoch(bookmark: Bookmark) -> None:
    """Workers that begin late join the same epoch; the iteration after it is another."""
    workers = forked(bookmark)
    assert epochs_of(workers, 17, [0, 1]) == [0, 0]
    assert epochs_of(workers, 17, [1, 0]) == [1, 1]
    first, last = forked(bookmark)
    join(first, 31, 0, 2)
    bookmark.set_epoch(7)
    assert join(last, 31, 1, 2).epoch == 2


def test_persistent_worker_that_starts_late_begins_with_the_first_iteration(
    bookmark: Bookmark,
) -> None:
    """Each iteration is one epoch, even if a state was loaded and the other is ahead."""
    first, late = forked(bookmark)
    for _ in range(2):
        join(first, 17, 0, 2)
    bookmark.load([saved(0, over=True), saved(1, over=True)], in_worker=False)
    assert join(first, 17, 0, 2).epoch == EPOCH + 1
    assert [join(late, 17, 1, 2).epoch for _ in range(3)] == [0, 1, EPOCH + 1]


def test_iteration_begun_while_another_is_held_reads_the_next_epoch(bookmark: Bookmark) -> None:
    """A new iterator may be made before the old one is dropped, with or without its worker."""
    with subprocess.Popen(["sleep", "60"]) as worker:
        join(spawned(bookmark), 17, 0, 1)
        with bookmark.counter.change() as count:
            count.passes[0].pid = worker.pid
        assert join(spawned(bookmark), 29, 0, 1).epoch == 1
        worker.kill()
    assert join(spawned(bookmark), 31, 0, 1).epoch == 2


def test_the_iteration_that_was_read_last_is_the_main_one(bookmark: Bookmark) -> None:
    """Those begun since were nested in it, whether they began before its second batch or after."""
    outer = join(bookmark)
    for epoch in (0, 1):
        nested = join(bookmark)
        bookmark.make_main(nested)
        assert nested.epoch == epoch
        assert bookmark.next_epoch == epoch + 1
        bookmark.make_main(outer)
        assert outer.role == "main"
        assert bookmark.next_epoch == 1


def test_look_that_was_overtaken_does_not_count_when_it_is_read_on(bookmark: Bookmark) -> None:
    """Others have read its epoch to the end since, and the next one follows."""
    look = join(bookmark)
    for _ in range(2):
        begun(bookmark)
    bookmark.make_main(look)
    assert look.role == "overtaken"
    assert bookmark.next_epoch == 2


def test_an_iteration_that_was_counted_and_left_is_followed_by_what_is_agreed_on() -> None:
    """The next epoch or the same follows. An iteration read to its end needs no agreement."""
    asked: list[tuple[int, int]] = []

    class Again(Epochs):
        def epoch_after(self, ended: int, *, counted_next: int, is_held: bool = False) -> int:
            asked.append((counted_next, ended))
            return ended

    bookmark = Bookmark(EpochCounter(), Again())
    iterations = [Iteration() for _ in range(3)]
    for iteration in iterations:
        bookmark.begin(iteration)
        bookmark.make_main(iteration)
        if iteration is iterations[1]:
            bookmark.finish(iteration)
    assert [each.epoch for each in iterations] == [0, 0, 1]
    assert asked == [(1, 0)]


def test_a_dropped_loader_with_the_number_of_the_next(bookmark: Bookmark) -> None:
    """Loaders seeded alike have one number: the workers of the new one stay together."""
    join(spawned(bookmark), 17, 0, 2)
    assert epochs_of(forked(bookmark), 17, [0, 1]) == [1, 1]


def test_many_dropped_loaders_leave_no_heap(bookmark: Bookmark) -> None:
    """The shared state is bounded, and each of them counts."""
    for loader in range(200):
        assert join(spawned(bookmark), loader, 0, 2).epoch == loader
    assert len(bookmark.counter.read().pack()) <= 4096


def test_an_epoch_that_is_set_holds_for_every_iteration(bookmark: Bookmark) -> None:
    """With workers and without, until another one is set."""
    begun(bookmark)
    for epoch in (7, 3):
        bookmark.set_epoch(epoch)
        assert bookmark.next_epoch == epoch
        assert [begun(bookmark).epoch, *epochs_of(forked(bookmark), 17, [0, 1])] == [epoch] * 3


def test_a_loaded_state_is_heard_of_by_workers_that_run(bookmark: Bookmark) -> None:
    """Workers yet to begin join the iteration; the next one resumes with the state's seeds."""
    first, second = forked(bookmark)
    join(first, 17, 0, 2)
    bookmark.set_epoch(2)
    bookmark.load([saved(reader, seeds={"": 5}) for reader in range(2)], in_worker=False)
    assert join(second, 17, 1, 2).epoch == 0
    assert begin([first, second], 17) == IN_THE_MIDDLE
    assert first.terms.seeds == {"": 5}
    assert second.terms.seeds == {"": 5}
    assert begun(bookmark).epoch == EPOCH + 1


def test_iterations_of_a_forked_process_are_its_own(bookmark: Bookmark) -> None:
    """It has inherited those of its parent, of which it reads none."""
    outer = begun(bookmark)
    pid = os.fork()
    if not pid:
        os._exit(0 if bookmark.current is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert bookmark.current is outer


def test_next_epoch_is_settled_as_an_iteration_would_settle_it() -> None:
    """Ranks agree on what follows an epoch that was ended early, once, whoever asks first."""
    bookmark = Bookmark(EpochCounter(), Repeated())
    bookmark.make_main(join(bookmark))
    assert bookmark.next_epoch == 1
    assert bookmark.settle_next_epoch() == 0
    assert bookmark.next_epoch == 0
    assert join(bookmark).epoch == 0


def test_next_epoch_that_was_set_needs_no_settling() -> None:
    """It is what the user has set."""
    bookmark = Bookmark(EpochCounter(), Repeated())
    bookmark.make_main(join(bookmark))
    bookmark.set_epoch(EPOCH)
    assert bookmark.settle_next_epoch() == EPOCH
