"""The kind of a loader's workers: with `workers="auto"`, threads if the global lock has room."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal, TypeAlias

from shardcache_client.loading.lock_probe import MAX_SAMPLES, LockProbe, LockUse

log = logging.getLogger("shardcache")

WorkerKind: TypeAlias = Literal["threads", "processes"]

OF_PROCESSES = ("multiprocessing_context", "persistent_workers", "worker_init_fn", "timeout")
"""Options that have no effect on threads."""

# Share of time for which threads and training may hold the lock, without long waits for it.
_MAX_DEMAND = 0.5

# Samples after which the shares are taken for known: of each worker, and of the training process.
_MIN_SAMPLES_A_WORKER = 60
_MIN_SAMPLES_OF_STEPS = 100

# Steps that take a smaller share of the time are not sampled: they count as holding the lock.
_MIN_STEP_SHARE = 0.05


def given_of_processes(options: Mapping[str, Any]) -> str | None:
    """Return the name of an option of worker processes that is given, if there is one."""
    return next((name for name in OF_PROCESSES if options.get(name)), None)


def has_global_lock() -> bool:
    """Return True unless this is a free-threaded Python that runs without its lock."""
    # Since Python 3.13.
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return is_enabled()


@dataclass(frozen=True, slots=True)
class Seen:
    """The use of the lock during a loader's first batches.

    Attributes:
        workers: number of worker processes.
        making: samples taken in all of them, while they made batches.
        steps: samples taken in the training process, in the steps of its loop.
        step_s: time that the loop spent in its steps.
        passed_s: all of its time, including that in which it waited for batches.
    """

    workers: int
    making: LockUse = field(default_factory=LockUse)
    steps: LockUse = field(default_factory=LockUse)
    step_s: float = 0.0
    passed_s: float = 0.0

    @property
    def training_demand(self) -> float | None:
        """Share of time for which training holds the lock; None while it is unknown."""
        if not self.passed_s:
            return None
        step_share = self.step_s / self.passed_s
        if step_share < _MIN_STEP_SHARE:
            return step_share
        # Not the share of all time: the loop may have waited for its first shards.
        return self.steps.share if self.steps.samples >= _MIN_SAMPLES_OF_STEPS else None

    @property
    def demand(self) -> float | None:
        """Share of time for which the lock would be held with threads; None while it is unknown."""
        training = self.training_demand
        if training is None or self.making.samples < _MIN_SAMPLES_A_WORKER * self.workers:
            return None
        return training + self.workers * self.making.share

    @property
    def kind(self) -> WorkerKind | None:
        """The kind of workers that suits this use; None while too little has been seen."""
        demand = self.demand
        if demand is None:
            return None
        return "threads" if demand <= _MAX_DEMAND else "processes"


class WorkerChoice:
    """The kind of one loader's workers, decided once. Can be pickled.

    Attributes:
        kind: None until it is decided; meanwhile, watched processes make the batches.
    """

    def __init__(self, kind: WorkerKind | None, workers: int) -> None:
        self.kind = kind
        self._seen = Seen(workers)

    def __repr__(self) -> str:
        return f"WorkerChoice({self.kind})"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> WorkerChoice:
        """Return the choice of a loader with these options, as given, but for num_workers."""
        kind: WorkerKind | Literal["auto"] = options["workers"]
        workers: int = options["num_workers"]
        if kind != "auto":
            return cls(kind, workers)
        if not workers:
            return cls("processes", workers)
        choice = cls(None, workers)
        given = given_of_processes(options)
        if given:
            choice._decide("processes", f"{given} is given")
        elif not has_global_lock():
            choice._decide("threads", "this Python has no global lock")
        return choice

    @property
    def is_open(self) -> bool:
        """True while it is not decided."""
        return self.kind is None

    def note_making(self, use: LockUse) -> None:
        """Note the use of the lock while a batch was made, and decide if that is enough."""
        self._seen = replace(self._seen, making=self._seen.making + use)
        kind = self._seen.kind
        if self.is_open and kind is not None:
            self._decide(kind, self._reason())

    def note_step(self, use: LockUse, step_s: float, passed_s: float) -> None:
        """Note a step of the loop.

        Args:
            use: of the lock during the step.
            step_s: its time.
            passed_s: time since the end of the one before it.
        """
        seen = self._seen
        self._seen = replace(
            seen,
            steps=seen.steps + use,
            step_s=seen.step_s + step_s,
            passed_s=seen.passed_s + passed_s,
        )

    def _reason(self) -> str:
        seen = self._seen
        training = seen.training_demand or 0.0
        return (
            f"making batches holds Python's global lock for {seen.making.share:.0%} of the time "
            f"of each worker, and the training loop for {training:.0%}"
        )

    def _decide(self, kind: WorkerKind, why: str) -> None:
        self.kind = kind
        log.info('workers="auto": the loader\'s workers are %s, as %s', kind, why)


class StepWatch:
    """Watches the steps of one iteration's loop while its loader's choice is open."""

    def __init__(self, choice: WorkerChoice) -> None:
        self._choice = choice
        self._probe = LockProbe(MAX_SAMPLES if choice.is_open else 0)
        self._begun_s = 0.0
        self._ended_s: float | None = None  # of the step before

    def begin(self) -> None:
        """Note that a step begins."""
        if self._choice.is_open:
            self._begun_s = monotonic()
            self._probe.begin()

    def end(self) -> None:
        """Note that the step has ended."""
        if not self._choice.is_open:
            return
        use = self._probe.end()
        now_s = monotonic()
        if self._ended_s is not None:
            self._choice.note_step(use, now_s - self._begun_s, now_s - self._ended_s)
        self._ended_s = now_s

    def close(self) -> None:
        """End watching."""
        self._probe.close()
