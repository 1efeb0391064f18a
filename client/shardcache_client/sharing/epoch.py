"""The iterations over a dataset: the epoch of each, which of them is counted, and which only looks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardcache_client.sharing.shared_state import Notes, SharedState

# Limit on remembered iterations, which abandoned loaders leave behind.
_REMEMBERED = 16

Agree = Callable[[int, int], int]
"""Returns the epoch that follows, given the next one by this trainer's count, and the last one, which it ended early.
May block."""


def by_own_count(epoch: int, _left: int) -> int:
    """Return this trainer's own count, without agreement with other ranks."""
    return epoch


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of a process among the workers of a DataLoader.

    Attributes:
        number: shared by all workers that the loader started together.
    """

    number: int
    worker: int
    workers: int


class EpochCounter:
    """Counts the iterations over a dataset, until `set` fixes the epoch.

    An iteration counts from its second batch on; until then it may be a look, of which nothing remains. The one that is
    counted is the main one as long as it is read; an iteration that begins in this time looks at the same epoch.

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
            _forget_main(notes)

    def chosen(self, *, iteration: int) -> int | None:
        """Return the epoch that is set for an iteration, None if none is.

        For a worker's first, it is the one that was set when the worker was started: the trainer may set another before
        the last of a loader's workers begins.

        Args:
            iteration: as for `begin`.
        """
        at_start = iteration == 1 and self._set_by != os.getpid()
        notes = self._shared_state.read_at_start() if at_start else self._shared_state.read()
        epoch: int | None = notes.get("chosen")
        return epoch

    def go_on(self, epoch: int) -> None:
        """Continue counting with this epoch as the next."""
        with self._shared_state.edit() as notes:
            notes.pop("chosen", None)
            notes["next"] = epoch
            _forget_main(notes)

    def begin(
        self,
        place: WorkerPlace | None = None,
        agree: Agree = by_own_count,
        *,
        iteration: int = 0,
        loaded: int | None = None,
        is_read: Callable[[Notes], bool] = lambda _: False,
    ) -> Notes:
        """Begin an iteration, or take part in the one that another worker of the same loader has begun; return it.

        Args:
            place: this process's place in its loader; None if it is not a worker.
            agree: called if the last iteration was ended early.
            iteration: number of this worker process's iteration, from 1. A persistent worker that starts late may begin
                its first iteration after the others have begun their second.
            loaded: epoch of the state that this worker has loaded for itself.
            is_read: returns True if an iteration that was begun without a loader is still being read.
        """
        reader = place and [place.number, iteration]
        with self._shared_state.turn():  # the first worker may wait for other ranks, the others for the first
            with self._shared_state.edit() as notes:
                found = _join(notes, reader, place.worker) if place else None
            if found is not None:
                return found
            chosen = self.chosen(iteration=iteration)
            epoch, look = notes.get("next", 0), False
            main = _main(notes)
            if loaded is not None and chosen in (None, loaded):
                epoch = loaded
            elif chosen is not None:
                epoch = chosen
                look = main is not None and epoch == main["epoch"] and _is_live(main, place, is_read)
            elif main is not None and len(main["read"]) < main["workers"]:
                look = _is_live(main, place, is_read)
                epoch = main["epoch"] if look else agree(epoch, main["epoch"])
            begun = {"epoch": epoch, "reader": reader, "look": look, "set": chosen is not None, "pid": os.getpid()}
            begun |= {"workers": place.workers if place else 1, "joined": [place.worker if place else 0], "read": []}
            with self._shared_state.edit() as notes:
                notes["begun"] = begun["number"] = notes.get("begun", 0) + 1
                if not look and chosen is None:
                    notes["next"] = epoch
                kept = [each for each in notes.get("iterations", []) if each["number"] == notes.get("main")]
                others = [each for each in notes.get("iterations", []) if each["number"] != notes.get("main")]
                notes["iterations"] = [*kept, *others[1 - _REMEMBERED :], begun]
            return begun

    def count(self, number: int, agree: Callable[[int], object] = lambda _: None) -> bool:
        """Count an iteration as the main one, unless it only looks, or another has been counted since it began.

        Args:
            agree: called with the epoch, before the iteration is counted for the first time.

        Returns True if it is the main one.
        """
        with self._shared_state.turn():
            notes = self._shared_state.read()
            found = _find(notes, number)
            if found is None or found["look"] or notes.get("main") == number:
                return found is not None and not found["look"]
            if not found["set"]:
                agree(found["epoch"])
            with self._shared_state.edit() as notes:
                for each in notes["iterations"]:
                    each["look"] = each["number"] != number
                notes["main"] = number
                if not found["set"]:
                    notes["next"] = found["epoch"] + 1
            return True

    def finish(self, number: int, worker: int = 0) -> bool:
        """Note that a worker has yielded the last sample of its part; return True if all workers have."""
        with self._shared_state.edit() as notes:
            found = _find(notes, number)
            if found is None:
                return False
            found["read"] = sorted({*found["read"], worker})
            return len(found["read"]) == int(found["workers"])


def _find(notes: Notes, number: int | None) -> Notes | None:
    return next((each for each in notes.get("iterations", []) if each["number"] == number), None)


def _main(notes: Notes) -> Notes | None:
    return _find(notes, notes.get("main"))


def _forget_main(notes: Notes) -> None:
    """Let no iteration that has begun count from now on; workers may still join it."""
    notes.pop("main", None)
    for each in notes.get("iterations", []):
        each["look"] = True


def _join(notes: Notes, reader: Any, worker: int) -> Notes | None:
    """Add the worker to the iteration that its loader has begun, and return that; None if there is none."""
    for each in reversed(notes.get("iterations", [])):  # an abandoned loader may have had the same number as this one
        if each["reader"] == reader and worker not in each["joined"]:
            each["joined"].append(worker)
            found: Notes = each
            return found
    return None


def _is_live(main: Notes, place: WorkerPlace | None, is_read: Callable[[Notes], bool]) -> bool:
    """Return True if the main iteration is still being read, but for a loader that begins its next one."""
    if main["reader"] is None:
        return is_read(main)
    if len(main["read"]) == main["workers"] or (place and main["reader"][0] == place.number):
        return False
    try:
        os.kill(main["pid"], 0)
    except ProcessLookupError:
        return False
    return True
