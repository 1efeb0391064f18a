"""A job in a process of its own, of which every sample is compared with what an undisturbed one reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import Self

from campaign.harness import Result
from campaign.restarts_job import Task

_TESTS = Path(__file__).parents[1]
# Longer than any recovery on a busy machine; what takes longer does not come.
HANG_S = 90.0
# Workers look every 5 s whether their job still runs.
_ORPHANED_S = 20.0
# A reader that had nothing to read for so long when the daemon was ready again waited for it.
_DRY_S = 0.3
# So much later than the daemon itself may we notice that it is ready.
_NOTICED_S = 0.1

Epoch = list[tuple[str, int]]  # keys and checksums, in order


class WatchedJob:
    """Runs `campaign.restarts_job`; a context manager.

    Args:
        epochs: what is to be read; None where that is to be found out.
    """

    def __init__(self, task: Task, epochs: list[Epoch] | None = None) -> None:
        self.read: list[Epoch] = []  # the epochs that were read to their end, where none are given to compare with
        self._task = task
        self._epochs = epochs
        self._result = Result("undisturbed")
        self._current: Epoch = []
        self._arrivals_s: list[float] = []
        self._whole = 0
        self._ended = False
        self._moved = threading.Condition()

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "campaign.restarts_job", self._task.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=_TESTS,
            start_new_session=True,
        )
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(HANG_S)
        self._watching.join(_ORPHANED_S)
        if self._watching.is_alive():
            # A worker that was being started when the job ended notices nothing of that, and keeps the pipe open.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._watching.join()
        self._process.stdout.close()
        self._log.close()

    def report_to(self, result: Result) -> None:
        """Count what goes wrong from now on there; once a sample has come, which is when the job runs."""
        with self._moved:
            self._result = result
            if self._ended:
                result.fail("lost", "the job had ended before")
            elif not self._moved.wait_for(lambda: self._arrivals_s or self._ended, HANG_S):
                result.fail("hangs", f"the job gave no sample within {HANG_S:g} s")

    def recovery_s(self, ready_s: float, result: Result) -> float | None:
        """Return how long after the daemon was ready a sample came to a reader that had none; None where one had."""
        begin_s = ready_s - _NOTICED_S
        with self._moved:
            if not self._moved.wait_for(lambda: self._ended or self._arrivals_s[-1] > begin_s, HANG_S):
                result.fail("hangs", f"no sample within {HANG_S:g} s of a daemon that is ready")
            if self._ended or self._arrivals_s[-1] <= begin_s:
                return None
            first = bisect_right(self._arrivals_s, begin_s)
            waited = first > 0 and self._arrivals_s[first - 1] < ready_s - _DRY_S
            return max(0.0, self._arrivals_s[first] - ready_s) if waited else None

    def finish_epoch(self, result: Result) -> None:
        """Wait until the present epoch, and so all of it, was compared."""
        with self._moved:
            wanted = self._whole + 1
            if not self._moved.wait_for(lambda: self._ended or self._whole >= wanted, HANG_S):
                result.fail("hangs", f"an epoch did not end within {HANG_S:g} s")

    def wait(self) -> None:
        """Wait until a job of some epochs has read them. Raises RuntimeError with the end of its log otherwise."""
        if self._process.wait(HANG_S):
            raise RuntimeError(self._tail())
        self._watching.join()

    def _watch(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            key, number = line.split()
            with self._moved:
                if key == "epoch":
                    self._compare(int(number))
                else:
                    self._arrivals_s.append(time.monotonic())
                    self._current.append((key, int(number)))
                self._moved.notify_all()
        status = self._process.wait()
        with self._moved:
            self._ended = True
            if status:
                story = self._tail()
                self._result.fail("lost" if "shardcache.errors." in story else "untyped", f"the job ended:\n{story}")
            self._moved.notify_all()

    def _compare(self, number: int) -> None:
        read, self._current = self._current, []
        self._whole += 1
        if self._epochs is None:
            self.read.append(read)
            return
        expected = self._epochs[number]
        if read == expected:
            return
        wrong = set(read) - set(expected)
        self._result.fail("wrong" if wrong else "lost", _difference(read, expected, number))

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def _difference(read: Epoch, expected: Epoch, number: int) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(read, expected, strict=False)) if a != b), min(len(read), len(expected))
    )
    return (
        f"epoch {number} has {len(read)} samples instead of {len(expected)}, and differs from place {place} on: "
        f"{read[place : place + 3]} instead of {expected[place : place + 3]}"
    )


def expected_epochs(job: WatchedJob, checksums: dict[str, int], count: int) -> list[Epoch]:
    """Return what an undisturbed job has read, after seeing that this is each sample once. Raises RuntimeError."""
    job.wait()
    if len(job.read) != count or any(sorted(epoch) != sorted(checksums.items()) for epoch in job.read):
        raise RuntimeError("an undisturbed job does not read each sample once")
    return job.read
