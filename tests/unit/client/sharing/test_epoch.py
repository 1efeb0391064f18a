"""epoch.py: workers of an iteration read one epoch; a counted one is followed by the next epoch, a look by none."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from shardcache_client.sharing.epoch import EpochCounter, WorkerPlace
from shardcache_client.sharing.shared_state import SharedState


@pytest.fixture
def epochs() -> EpochCounter:
    """The count of a dataset that was just made."""
    return EpochCounter(SharedState())


def join(epochs: EpochCounter, loader: int, worker: int, workers: int, number: int = 1) -> Any:
    """Have a loader's worker begin; return its iteration."""
    return epochs.begin(WorkerPlace(loader, worker, workers), iteration=number)


def read(epochs: EpochCounter, loader: int, order: list[int], number: int = 1) -> list[int]:
    """Have a loader's workers begin in an order, and count the iteration; return the epoch that each reads."""
    begun = [join(epochs, loader, worker, len(order), number) for worker in order]
    epochs.count(begun[0]["number"])
    for worker in order:
        epochs.finish(begun[0]["number"], worker)
    return [each["epoch"] for each in begun]


def alone(epochs: EpochCounter) -> int:
    """Read an epoch without workers."""
    begun = epochs.begin()
    epochs.count(begun["number"])
    epochs.finish(begun["number"])
    return int(begun["epoch"])


def test_counted_iterations_read_one_epoch_after_another(epochs: EpochCounter) -> None:
    """To ask which is next takes none, and a look takes none."""
    assert [epochs.next, epochs.next] == [0, 0]
    assert [epochs.begin()["epoch"] for _ in range(3)] == [0, 0, 0]
    assert [alone(epochs) for _ in range(3)] == [0, 1, 2]
    assert epochs.next == 3


def test_workers_that_begin_at_any_time_read_the_same_epoch(epochs: EpochCounter) -> None:
    """Also when the first has long begun and the last begins late; the iteration after that is another."""
    assert read(epochs, 17, [0, 1, 2]) == [0, 0, 0]
    assert read(epochs, 29, [2, 0, 1]) == [1, 1, 1]
    begun = join(epochs, 31, 0, 2)
    epochs.count(begun["number"])
    epochs.set(7)
    assert join(epochs, 31, 1, 2)["epoch"] == begun["epoch"] == 2


def test_iterations_of_persistent_workers_are_distinct(epochs: EpochCounter) -> None:
    """They keep their loader's number: each takes part once in an iteration, in its first, second and third."""
    orders = enumerate(([0, 1], [1, 0], [0, 1]), 1)
    assert [read(epochs, 17, order, number) for number, order in orders] == [[0, 0], [1, 1], [2, 2]]


def test_a_persistent_worker_that_starts_late_begins_with_the_first_iteration(epochs: EpochCounter) -> None:
    """The other has begun its second by then, and a state was loaded: each iteration is one epoch all the same."""
    for number in (1, 2):
        epochs.count(join(epochs, 17, 0, 2, number)["number"])
    epochs.go_on(7)
    assert join(epochs, 17, 0, 2, 3)["epoch"] == 7
    assert [join(epochs, 17, 1, 2, number)["epoch"] for number in (1, 2, 3)] == [0, 1, 7]


def test_an_iteration_that_begins_while_another_is_read_looks_at_the_same_epoch(epochs: EpochCounter) -> None:
    """As long as the worker of the other one lives: it is never counted, however much of it is read."""
    with subprocess.Popen(["sleep", "60"]) as worker:
        main = join(epochs, 17, 0, 1)
        epochs.count(main["number"])
        with epochs._shared_state.edit() as notes:
            notes["iterations"][0]["pid"] = worker.pid
        look = join(epochs, 29, 0, 1)
        assert (look["epoch"], look["look"]) == (0, True)
        assert not epochs.count(look["number"])
        worker.kill()
    assert (join(epochs, 31, 0, 1)["epoch"], epochs.next) == (1, 1)


def test_the_first_of_two_iterations_to_be_counted_makes_the_other_a_look(epochs: EpochCounter) -> None:
    """Both have begun with the same epoch, and one goes on: the other may be read, too, and counts for nothing."""
    first, second = epochs.begin(), epochs.begin()
    assert first["epoch"] == second["epoch"] == 0
    assert epochs.count(second["number"])
    assert not epochs.count(first["number"])
    assert epochs.next == 1


def test_an_iteration_that_was_counted_and_left_is_followed_by_what_is_agreed_on(epochs: EpochCounter) -> None:
    """The next epoch or the same again. One that was read to its end needs no agreement, nor does a look."""
    asked: list[tuple[int, int]] = []

    def again(epoch: int, left: int) -> int:
        asked.append((epoch, left))
        return left

    left = epochs.begin(agree=again)
    assert epochs.count(left["number"])
    second = epochs.begin(agree=again)
    assert (second["epoch"], asked) == (0, [(1, 0)])
    epochs.count(second["number"])
    epochs.finish(second["number"])
    assert (epochs.begin(agree=again)["epoch"], asked) == (1, [(1, 0)])


def test_a_dropped_loader_with_the_number_of_the_next(epochs: EpochCounter) -> None:
    """Loaders seeded alike have one number: the workers of the new one stay together."""
    epochs.count(join(epochs, 17, 0, 2)["number"])
    assert read(epochs, 17, [0, 1]) == [1, 1]


def test_many_dropped_loaders_leave_no_heap() -> None:
    """The shared memory is bounded, and the main iteration is not forgotten."""
    shared_state = SharedState()
    epochs = EpochCounter(shared_state)
    main = join(epochs, 0, 0, 2)
    epochs.count(main["number"])
    for loader in range(1, 1_000):
        join(epochs, loader, 0, 2)
    assert len(str(shared_state.read())) < 5_000
    assert [epochs.finish(main["number"], worker) for worker in range(2)] == [False, True]


def test_an_epoch_that_is_set_holds_for_every_iteration(epochs: EpochCounter) -> None:
    """With workers and without, until another one is set."""
    alone(epochs)
    for epoch in (7, 3):
        epochs.set(epoch)
        assert epochs.next == epoch
        assert [alone(epochs), *read(epochs, 17, [0, 1]), *read(epochs, 17, [1, 0])] == [epoch] * 5


def test_going_on_counts_from_there(epochs: EpochCounter) -> None:
    """A new iteration ends settings of the last one, and iterations that some workers have yet to begin."""
    begun = join(epochs, 17, 0, 2)
    epochs.set(2)
    epochs.go_on(5)
    assert not epochs.count(begun["number"])
    assert read(epochs, 29, [0, 1]) == [5, 5]
    assert alone(epochs) == 6


def test_another_process_counts_on() -> None:
    """Epochs over one shared state are one count: that is how workers started later know of those before."""
    shared_state = SharedState()
    assert [alone(EpochCounter(shared_state)) for _ in range(3)] == [0, 1, 2]
    assert shared_state.read()["iterations"][-1]["pid"] == os.getpid()
