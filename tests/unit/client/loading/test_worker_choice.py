"""worker_choice.py: threads where the global lock has room for them; in doubt, processes."""

import logging
import pickle
from typing import Any

import pytest

from shardcache_client.loading.lock_probe import LockUse
from shardcache_client.loading.worker_choice import ObservedLockUse, WorkerChoice

MANY = 1000

Log = pytest.LogCaptureFixture


def held(share: float, samples: int = MANY) -> LockUse:
    """Return samples of which a share found the lock held."""
    return LockUse(samples, round(share * samples))


@pytest.mark.parametrize(
    ("workers", "making", "training", "kind"),
    [
        (1, 0.0, 0.0, "threads"),
        (1, 0.5, 0.0, "threads"),
        (1, 0.51, 0.0, "processes"),
        (2, 0.05, 0.3, "threads"),
        (2, 0.05, 0.5, "processes"),
        (8, 0.05, 0.0, "threads"),
        (8, 0.05, 0.2, "processes"),
        (2, 1.0, 0.0, "processes"),
        (2, 0.0, 1.0, "processes"),
    ],
)
def test_threads_are_chosen_if_all_of_them_and_training_hold_the_lock_for_half_of_the_time(
    workers: int, making: float, training: float, kind: str
) -> None:
    """At most. Each thread holds it for as long as the worker process did."""
    seen = ObservedLockUse(
        workers, making=held(making), steps=held(training), step_s=1.0, passed_s=1.0
    )
    assert seen.kind == kind


@pytest.mark.parametrize("making", [0, 119])
def test_few_samples_of_the_workers_decide_nothing(making: int) -> None:
    """Each of two has to be seen for a while."""
    seen = ObservedLockUse(2, making=held(0.0, making), steps=held(0.0), step_s=1.0, passed_s=1.0)
    assert seen.kind is None


def test_few_samples_of_the_steps_decide_nothing() -> None:
    """Unless steps are so short that they do not matter."""
    kind = ObservedLockUse(2, making=held(0.0), steps=held(0.0, 99), step_s=1.0, passed_s=10.0).kind
    assert kind is None
    quick = ObservedLockUse(2, making=held(0.0), steps=held(0.0, 0), step_s=1.0, passed_s=30.0)
    assert quick.kind == "threads"


def test_loop_that_has_not_ended_a_step_decides_nothing() -> None:
    """Nobody knows how long its steps take."""
    assert ObservedLockUse(2, making=held(0.0)).kind is None


def test_wait_for_the_first_batches_does_not_hide_what_steps_hold() -> None:
    """Later, they may come one after another."""
    kind = ObservedLockUse(2, making=held(0.0), steps=held(0.9), step_s=1.0, passed_s=10.0).kind
    assert kind == "processes"


@pytest.mark.parametrize(
    "given",
    [{"worker_init_fn": print}, {"persistent_workers": True}, {"multiprocessing_context": "spawn"}],
)
def test_options_of_processes_choose_processes(given: dict[str, Any], caplog: Log) -> None:
    """They would have no effect on threads; the log names the first."""
    caplog.set_level(logging.INFO, "shardcache")
    choice = WorkerChoice.of({"workers": "auto", "num_workers": 2} | given)
    assert choice.kind == "processes"
    (message,) = caplog.messages
    assert message.endswith(f"the loader's workers are processes, as {next(iter(given))} is given")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_kind_that_is_given_is_no_choice(kind: str, caplog: Log) -> None:
    """Nothing is measured or logged."""
    caplog.set_level(logging.INFO, "shardcache")
    choice = WorkerChoice.of({"workers": kind, "num_workers": 2})
    assert choice.kind == kind
    assert caplog.messages == []


def test_choice_is_logged_once_with_what_was_seen(caplog: Log) -> None:
    """As soon as enough has been seen, and it stays."""
    caplog.set_level(logging.INFO, "shardcache")
    choice = WorkerChoice(None, 2)
    choice.note_step(held(0.1), 1.0, 2.0)
    choice.note_making(held(0.02))
    choice.note_making(held(1.0))
    assert choice.kind == "threads"
    (message,) = caplog.messages
    assert "2% of the time of each worker, and the training loop for 10%" in message


def test_copy_of_an_open_choice_goes_on_from_what_was_seen() -> None:
    """In another process, too."""
    choice = WorkerChoice(None, 2)
    choice.note_step(held(0.1), 1.0, 2.0)
    copy = pickle.loads(pickle.dumps(choice))
    copy.note_making(held(0.02))
    assert copy.kind == "threads"
    assert choice.is_open
