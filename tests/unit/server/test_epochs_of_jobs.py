"""Epochs of jobs, as the log has them."""

from __future__ import annotations

from shardcache.server.audit import Epochs

JOB = ("train", 0)


def test_readers_in_any_order_begin_an_epoch_once() -> None:
    """Some are an epoch ahead of others; another job and another user of its name have epochs of their own."""
    epochs = Epochs()
    steps = [(0, (0, 0)), (0, (0, 1)), (1, (0, 0)), (0, (1, 0)), (1, (1, 0)), (1, (0, 1)), (2, (0, 1))]
    assert [number for number, reader in steps if epochs.begins(JOB, number, reader)] == [0, 1, 2]
    assert epochs.begins(("eval", 0), 0, (0, 0)) and epochs.begins(("train", 1000), 0, (0, 0))


def test_a_reader_that_begins_again_begins_for_all() -> None:
    """The job was started again; its other readers join that run."""
    epochs = Epochs()
    begun = [epochs.begins(JOB, 0, (0, worker)) for worker in (0, 1, 2, 0, 1, 2, 2)]
    assert begun == [True, False, False, True, False, False, True]


def test_job_names_of_clients_are_bounded() -> None:
    """Numbers that a client makes up take no memory without end."""
    epochs = Epochs()
    for number in range(5000):
        epochs.begins(JOB, number, (0, 0))
        epochs.begins(JOB, None, (number, 0))
    assert len(epochs) < 1000 and max(map(len, epochs)) < 2000
