"""The kind of a loader's workers, threads or processes, and its choice with `workers="auto"`.

Threads start faster and copy nothing, but only one thread at a time can hold Python's global lock
("the lock" in this module). So a loader begins with processes, observes how much of the time the
lock is held, and changes to threads if they would rarely wait for it.
"""

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

PROCESS_OPTIONS = ("multiprocessing_context", "persistent_workers", "worker_init_fn", "timeout")
"""Options that have no effect on threads."""

# Maximum share of time for which all threads and training together may hold the lock. Above it,
# they would wait too long for it.
_MAX_DEMAND = 0.5

# Minimum numbers of samples of the lock (see `lock_probe`), below which the shares of time count as
# unknown: per worker, and for the steps of the training loop.
_MIN_SAMPLES_PER_WORKER = 60
_MIN_SAMPLES_OF_STEPS = 100

# If training steps take a smaller share of the time than this, no samples of them are needed: they
# count as holding the lock throughout.
_MIN_STEP_SHARE = 0.05


def process_option_in(options: Mapping[str, Any]) -> str | None:
    """Return the name of an option for worker processes that is set, if there is one."""
    return next((name for name in PROCESS_OPTIONS if options.get(name)), None)


def has_global_lock() -> bool:
    """Return True unless this is a free-threaded Python that runs without its lock."""
    # The function exists since Python 3.13. Earlier versions always have the lock.
    is_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return is_enabled()


@dataclass(frozen=True, slots=True)
class ObservedLockUse:
    """The use of the lock during a loader's first batches.

    Attributes:
        workers: number of worker processes.
        making: samples taken in all worker processes, while they made batches.
        steps: samples taken in the training process, during the steps of its loop.
        step_s: time that the loop spent in its steps.
        passed_s: all time of the loop, including its waits for batches.
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
        if self.steps.samples < _MIN_SAMPLES_OF_STEPS:
            return None
        # The share is counted as if the loop did nothing but its steps. Its waits so far do not
        # count, because they may have been waits for the first shards.
        return self.steps.share

    @property
    def demand(self) -> float | None:
        """Share of time for which threads and training would need the lock; None while unknown.

        It is above 1 if one lock would not be enough.
        """
        training = self.training_demand
        if training is None or self.making.samples < _MIN_SAMPLES_PER_WORKER * self.workers:
            return None
        return training + self.workers * self.making.share

    @property
    def kind(self) -> WorkerKind | None:
        """The kind of workers that suits this use; None while too little has been observed."""
        demand = self.demand
        if demand is None:
            return None
        return "threads" if demand <= _MAX_DEMAND else "processes"


class WorkerChoice:
    """The kind of one loader's workers, decided once. Can be pickled.

    The choice is open until then: processes make the batches, and their use of the lock is sampled.

    Attributes:
        kind: the kind; None while the choice is open.
    """

    def __init__(self, kind: WorkerKind | None, workers: int) -> None:
        self.kind = kind
        self._observed = ObservedLockUse(workers)

    def __repr__(self) -> str:
        return f"WorkerChoice({self.kind})"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> WorkerChoice:
        """Return the choice of a loader with these options.

        Args:
            options: the loader's options as the user gave them; but "num_workers" must be a number,
                not None.
        """
        kind: WorkerKind | Literal["auto"] = options["workers"]
        workers: int = options["num_workers"]
        if kind != "auto":
            return cls(kind, workers)
        if not workers:
            return cls("processes", workers)
        choice = cls(None, workers)  # None: the kind is decided below, or after the first batches
        option = process_option_in(options)
        if option:
            choice._decide("processes", f"{option} is given")
        elif not has_global_lock():
            choice._decide("threads", "this Python has no global lock")
        return choice

    @property
    def is_open(self) -> bool:
        """True until the kind is decided."""
        return self.kind is None

    def note_making(self, use: LockUse) -> None:
        """Note the use of the lock while a batch was made; decide once enough has been observed."""
        self._observed = replace(self._observed, making=self._observed.making + use)
        kind = self._observed.kind
        if self.is_open and kind is not None:
            self._decide(kind, self._reason())

    def note_step(self, use: LockUse, step_s: float, passed_s: float) -> None:
        """Note a step of the loop.

        Args:
            use: samples of the lock during the step.
            step_s: duration of the step.
            passed_s: time from the end of the previous step to the end of this step.
        """
        observed = self._observed
        self._observed = replace(
            observed,
            steps=observed.steps + use,
            step_s=observed.step_s + step_s,
            passed_s=observed.passed_s + passed_s,
        )

    def _reason(self) -> str:
        """Return a clause about what was observed, for the log."""
        making = self._observed.making.share
        training = self._observed.training_demand or 0.0
        return (
            f"making batches holds Python's global lock for {making:.0%} of the time "
            f"of each worker, and the training loop for {training:.0%}"
        )

    def _decide(self, kind: WorkerKind, reason: str) -> None:
        """Set the kind, and log it with its reason."""
        self.kind = kind
        log.info('workers="auto": the loader\'s workers are %s, as %s', kind, reason)


class StepWatch:
    """Watches the steps of one iteration's loop while its loader's choice is open."""

    def __init__(self, choice: WorkerChoice) -> None:
        self._choice = choice
        self._probe = LockProbe(MAX_SAMPLES if choice.is_open else 0)
        self._begun_s = 0.0
        self._ended_s: float | None = None  # end of the last step; None until the first has ended

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
            self._choice.note_step(
                use,
                step_s=now_s - self._begun_s,
                passed_s=now_s - self._ended_s,
            )
        self._ended_s = now_s

    def close(self) -> None:
        """Stop watching."""
        self._probe.close()
