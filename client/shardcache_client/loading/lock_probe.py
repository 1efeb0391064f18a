"""Probe of Python's global lock: the share of its time for which some work holds the lock.

A sample is one test, at a random time during the work, of whether the lock is held. Worker
processes and the training loop are probed while `worker_choice` has not chosen between threads and
processes.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from dataclasses import dataclass
from random import Random

MAX_SAMPLES = 120
"""Number of samples that is enough for one process. Taking them needs 0.25 s of its work."""

# Limits of the pauses between samples. Pauses are irregular, as the work may be regular. They are
# much shorter than making a batch, and much longer than taking a sample.
_MIN_PAUSE_S = 0.001
_MAX_PAUSE_S = 0.003

_MIN_PROGRESS_S = 0.0001
"""Processor time that other threads must get after a held lock before the next sample counts."""


@dataclass(frozen=True, slots=True)
class LockUse:
    """Counts of samples of the global lock, taken at random times of some work.

    Attributes:
        samples: number of samples.
        held: number of samples that found the lock held.
    """

    samples: int = 0
    held: int = 0

    def __add__(self, other: LockUse) -> LockUse:
        return LockUse(self.samples + other.samples, self.held + other.held)

    def __sub__(self, other: LockUse) -> LockUse:
        return LockUse(self.samples - other.samples, self.held - other.held)

    @property
    def share(self) -> float:
        """The share of the work's time in which the lock was held; 0 without samples."""
        return self.held / self.samples if self.samples else 0.0


class LockProbe:
    """Samples whether this process holds Python's global lock while it works.

    A thread sleeps for a moment, and needs the lock when it wakes. If the lock is held, the thread
    has to wait once more, and the kernel counts its waits. Only the number of waits matters, not
    their length, so the load of the machine has no effect on the result.

    Args:
        max_samples: number of samples after which the thread ends; 0 for no samples and no thread.
    """

    def __init__(self, max_samples: int) -> None:
        self._max_samples = max_samples
        self._has_begun = False
        self._is_closed = False
        self._at_work = threading.Event()  # set while a piece of work is being done
        self._begun_s = 0.0  # time at which that piece began
        self._thread: threading.Thread | None = None
        self._use = LockUse()  # all samples so far
        self._reported = LockUse()  # those that `end` has returned

    def begin(self) -> None:
        """Note that a piece of work begins.

        The first piece is not sampled, because it imports modules.
        """
        if not self._has_begun:
            self._has_begun = True
            return
        if self._thread is None and self._max_samples:
            sampling = threading.Thread(target=self._sample, name="shardcache-probe", daemon=True)
            sampling.start()
            self._thread = sampling
        self._begun_s = time.monotonic()
        self._at_work.set()

    def end(self) -> LockUse:
        """Note that the piece has ended; return the samples that were taken during it."""
        self._at_work.clear()
        use = self._use
        new = use - self._reported
        self._reported = use
        return new

    def close(self) -> None:
        """End the thread, if there is one."""
        self._is_closed = True
        self._at_work.set()  # wakes the thread, which then sees that the probe is closed
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        """Take the samples, in the probe's thread, while pieces of work are being done."""
        # A separate generator: training depends on the sequence of the global one.
        pauses = Random()
        # A sample that finds the lock held takes it from the thread at work. The next sample counts
        # only if that thread has worked again: if the processor time of all other threads has
        # reached this value.
        needed_work_s = 0.0
        while self._use.samples < self._max_samples:
            if not self._at_work.is_set():
                self._at_work.wait()
                waited_s = time.monotonic() - self._begun_s
                # After the switch interval, Python takes the lock from a thread that holds it. If
                # this thread got the lock in that way, the work's thread has to get it back first.
                if waited_s >= sys.getswitchinterval():
                    needed_work_s = _work_of_others_s() + _MIN_PROGRESS_S
            if self._is_closed:
                return
            is_held = _is_held_after(pauses.uniform(_MIN_PAUSE_S, _MAX_PAUSE_S))
            # On a busy machine, the thread at work may not have run since the last sample. The lock
            # is then free only because that sample took it.
            work_s = _work_of_others_s()
            if work_s < needed_work_s or not self._at_work.is_set():
                continue
            self._use += LockUse(samples=1, held=int(is_held))
            needed_work_s = 0.0
            if is_held:
                needed_work_s = work_s + _MIN_PROGRESS_S


def _is_held_after(pause_s: float) -> bool:
    """Sleep; return True if this thread then had to wait for the lock.

    Returns True as well if the kernel does not count waits.
    """
    waits_before = _voluntary_waits()
    time.sleep(pause_s)
    waits = _voluntary_waits() - waits_before
    return waits != 1  # the sleep itself counts as one wait


def _work_of_others_s() -> float:
    """Return the processor time of this process's other threads."""
    return time.process_time() - time.thread_time()


def _voluntary_waits() -> int:
    """Return how often this thread has waited for anything but a processor."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
