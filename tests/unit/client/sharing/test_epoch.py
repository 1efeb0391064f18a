"""epoch.py: all workers of a loader's iteration read the same epoch, the next iteration the next one."""

from __future__ import annotations

import pytest

from shardcache_client.sharing.epoch import EpochCounter
from shardcache_client.sharing.shared_state import SharedState


@pytest.fixture
def epochs() -> EpochCounter:
    """The count of a dataset that was just made."""
    return EpochCounter(SharedState())


def iteration(epochs: EpochCounter, loader: int, order: list[int], number: int = 1) -> list[int]:
    """Have a loader's workers begin in an order; return the epoch that each of them reads."""
    return [epochs.join(loader, worker, len(order), iteration=number) for worker in order]


def test_iterations_are_counted(epochs: EpochCounter) -> None:
    """Each reads the epoch after the last one; to look which is next takes none."""
    assert [epochs.next, epochs.next] == [0, 0]
    assert [epochs.begin() for _ in range(3)] == [0, 1, 2]
    assert epochs.next == 3


def test_workers_that_begin_at_any_time_read_the_same(epochs: EpochCounter) -> None:
    """Also when the first has long begun and the last begins late; the iteration after that is another."""
    assert iteration(epochs, 17, [0, 1, 2]) == [0, 0, 0]
    assert iteration(epochs, 29, [2, 0, 1]) == [1, 1, 1]


def test_iterations_of_persistent_workers_are_told_apart(epochs: EpochCounter) -> None:
    """They keep their loader's number: each takes part once in an iteration, in its first, second and third."""
    orders = enumerate(([0, 1], [1, 0], [0, 1]), 1)
    assert [iteration(epochs, 17, order, number) for number, order in orders] == [[0, 0], [1, 1], [2, 2]]


def test_a_persistent_worker_that_starts_late_begins_with_the_first_iteration(epochs: EpochCounter) -> None:
    """The other has begun its second by then, and a state was loaded: each iteration is one epoch all the same."""
    assert [epochs.join(17, 0, 2, iteration=number) for number in (1, 2)] == [0, 1]
    epochs.go_on(7)
    assert epochs.join(17, 0, 2, iteration=3) == 7
    assert [epochs.join(17, 1, 2, iteration=number) for number in (1, 2, 3)] == [0, 1, 7]


def test_loaders_at_the_same_time_have_epochs_of_their_own(epochs: EpochCounter) -> None:
    """Two iterators over one dataset do not mix theirs up, however their workers take turns, nor with a third."""
    begun = [epochs.join(loader, worker, 2) for loader, worker in ((17, 0), (29, 0), (29, 1), (17, 1))]
    assert begun == [0, 1, 1, 0]
    assert epochs.begin() == 2


def test_a_loader_that_was_dropped_at_once(epochs: EpochCounter) -> None:
    """Of which only some workers had begun: the next one's do not take part in its epoch, nor does it harm a third."""
    epochs.join(17, 0, 2)
    assert iteration(epochs, 29, [1, 0]) == [1, 1]
    assert iteration(epochs, 31, [0, 1]) == [2, 2]


def test_a_dropped_loader_with_the_number_of_the_next(epochs: EpochCounter) -> None:
    """Loaders seeded alike have one number: the workers of the new one stay together."""
    epochs.join(17, 0, 2)
    assert iteration(epochs, 17, [0, 1]) == [1, 1]


def test_many_dropped_loaders_leave_no_heap() -> None:
    """The board's memory is bounded."""
    shared_state = SharedState()
    epochs = EpochCounter(shared_state)
    for loader in range(1_000):
        assert epochs.join(loader, 0, 2) == loader
    assert len(str(shared_state.read())) < 5_000


def test_what_was_set_holds_for_every_iteration(epochs: EpochCounter) -> None:
    """With workers and without, until another one is set."""
    epochs.begin()
    for epoch in (7, 3):
        epochs.set(epoch)
        assert epochs.next == epoch
        assert [epochs.begin(), *iteration(epochs, 17, [0, 1]), *iteration(epochs, 17, [1, 0])] == [epoch] * 5


def test_going_on_counts_from_there(epochs: EpochCounter) -> None:
    """A new iteration ends settings of the last one, and iterations that some workers have yet to begin."""
    epochs.join(17, 0, 2)
    epochs.set(2)
    epochs.go_on(5)
    assert iteration(epochs, 29, [0, 1]) == [5, 5]
    assert epochs.begin() == 6


def test_another_process_counts_on() -> None:
    """Epochs over one board are one count: that is how workers started later know of those before."""
    shared_state = SharedState()
    assert [EpochCounter(shared_state).begin() for _ in range(3)] == [0, 1, 2]
