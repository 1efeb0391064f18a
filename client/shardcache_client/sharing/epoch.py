"""The epoch of each iteration, the same for all workers of the loader that begins it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardcache_client.sharing.shared_state import SharedState

# Limit on remembered iterations that not all workers have begun; abandoned loaders leave some behind.
_REMEMBERED = 64

Agree = Callable[[int, int | None], int]
"""Returns the epoch that an iteration is to read, given the next one by this trainer's count, and the last one if this
trainer ended it early. Called once for each iteration that is counted. May block."""


def by_own_count(epoch: int, _left: int | None) -> int:
    """Return this trainer's own count, without agreement with other ranks."""
    return epoch


class EpochCounter:
    """Counts the iterations over a dataset, until `set` fixes the epoch.

    Args:
        shared_state: shared by a trainer and its workers.
    """

    def __init__(self, shared_state: SharedState) -> None:
        self._shared_state = shared_state
        self._set_by = 0  # pid of the process that has set an epoch last, as far as this process knows

    def __repr__(self) -> str:
        return f"EpochCounter(next={self.next})"

    @property
    def next(self) -> int:
        """The epoch that an iteration would read if it began now."""
        notes = self._shared_state.read()
        epoch: int = notes["chosen"] if "chosen" in notes else notes.get("next", 0)
        return epoch

    def set(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on."""
        self._set_by = os.getpid()
        with self._shared_state.edit() as notes:
            notes["chosen"] = epoch

    def chosen(self, *, iteration: int) -> int | None:
        """Return the epoch that is set for an iteration, None if none is.

        For a worker's first, it is the one that was set when the worker was started: the trainer may set another before
        the last of a loader's workers begins.

        Args:
            iteration: as for `join`; 0 in a process that is not a worker.
        """
        at_start = iteration == 1 and self._set_by != os.getpid()
        notes = self._shared_state.read_at_start() if at_start else self._shared_state.read()
        epoch: int | None = notes.get("chosen")
        return epoch

    def go_on(self, epoch: int) -> None:
        """Continue counting with this epoch as the next."""
        with self._shared_state.edit() as notes:
            notes.pop("chosen", None)
            notes |= {"next": epoch, "last": None}

    def passed(self, agree: Agree, epoch: int, loader: int | None = None, workers: int = 1) -> None:
        """Continue counting after this epoch, which an iteration resumes from its own state."""
        with self._shared_state.turn():
            last = self._shared_state.read().get("last")
            if last is None or [last["loader"], last["epoch"]] != [loader, epoch]:
                agree(epoch, None)
                self._note(epoch, loader, workers)

    def begin(self, agree: Agree = by_own_count) -> int:
        """Return the epoch for an iteration in a process without workers."""
        chosen = self.chosen(iteration=0)
        if chosen is not None:
            return chosen
        with self._shared_state.turn():
            return self._count(agree, None, 1)

    def join(self, loader: int, worker: int, workers: int, agree: Agree = by_own_count, *, iteration: int = 1) -> int:
        """Return the epoch for a worker's part of an iteration.

        Args:
            loader: a number shared by the workers of one iteration. Persistent workers keep it.
            iteration: number of this worker process's iteration, from 1. A persistent worker that starts late may begin
                its first iteration after the others have begun their second.
        """
        chosen = self.chosen(iteration=iteration)
        if chosen is not None and iteration == 1:
            return chosen
        with self._shared_state.turn():  # the first worker may wait for other ranks, the others for the first
            epoch = self._take_part([loader, iteration], worker, workers)
            if epoch is None:
                epoch = self._count(agree, loader, workers) if chosen is None else chosen
                with self._shared_state.edit() as notes:
                    begun = [*notes.setdefault("begun", []), [[loader, iteration], epoch, [worker]]]
                    notes["begun"] = [each for each in begun if len(each[2]) < workers][-_REMEMBERED:]
            return epoch

    def _take_part(self, iteration: list[int], worker: int, workers: int) -> int | None:
        """Add the worker to the iteration that its loader has begun, and return the epoch; None if there is none."""
        with self._shared_state.edit() as notes:
            begun: list[list[Any]] = notes.setdefault("begun", [])
            for each in reversed(begun):  # an abandoned loader may have had the same number as this one
                if each[0] == iteration and worker not in each[2]:
                    each[2].append(worker)
                    notes["begun"] = [each for each in begun if len(each[2]) < workers]
                    epoch: int = each[1]
                    return epoch
        return None

    def _count(self, agree: Agree, loader: int | None, workers: int) -> int:
        notes = self._shared_state.read()
        last = notes.get("last")
        epoch = agree(notes.get("next", 0), last["epoch"] if last and last["unread"] else None)
        self._note(epoch, loader, workers)
        return epoch

    def _note(self, epoch: int, loader: int | None, workers: int) -> None:
        with self._shared_state.edit() as notes:
            notes["next"] = epoch + 1
            notes["last"] = {"epoch": epoch, "loader": loader, "unread": list(range(workers))}

    def finish(self, epoch: int, loader: int | None = None, worker: int = 0) -> None:
        """Note that a worker has yielded the last sample of its part of an iteration."""
        with self._shared_state.edit() as notes:
            last = notes.get("last")
            if last and [last["epoch"], last["loader"]] == [epoch, loader] and worker in last["unread"]:
                last["unread"].remove(worker)
