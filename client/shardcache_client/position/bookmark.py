"""A dataset's position: its iterations, the epoch of the next one, and the states from which it resumes."""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.position.state import ReaderState, Saved, find_states, find_turn
from shardcache_client.ranks.group import Epochs
from shardcache_client.sharing.shared_notes import Notes, SharedNotes

_MAX_REMEMBERED = 16
"""Limit on the iterations noted, which abandoned loaders leave behind."""


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration over a dataset, in the process that reads it."""

    loader: int | None = None  # a number shared by the workers that a DataLoader started together; None elsewhere
    worker: int = 0
    workers: int = 1
    epoch: int = 0
    states: Sequence[Saved] = ()  # from which it resumes; none if it reads the epoch from its beginning
    turn: int = 0  # number of the worker that has the first turn, if there are as many as there were
    looks: bool = False  # True if it does not count: it was nested in another, or has been overtaken
    is_set: bool = False  # True if the epoch was set, not counted
    place: Any = None  # tracks its position
    done: bool = False  # True if nothing of it is left
    ended: bool = False  # True once it was read to its end
    counted: bool = False  # True once it was the main one
    number: int = 0
    pid: int = 0
    loads: int = 0  # number of states loaded before it began
    _reader: weakref.ref[Iterator[Any]] | None = None

    def read_by(self, reader: Iterator[Any]) -> None:
        """Note the generator that the user holds."""
        self._reader = weakref.ref(reader)

    @property
    def live(self) -> bool:
        """True until the generator has ended, or the user has dropped it."""
        reader = None if self._reader is None else self._reader()
        return getattr(reader, "gi_frame", None) is not None


class Bookmark:
    """Position of a dataset, shared by a trainer and its workers, except for states that a worker loads itself.

    Iterations are counted, until `set_epoch` fixes the epoch. One counts from its second batch, or its last one; until
    then it may be a look, of which nothing remains. The last one to count is the main one, and the next one reads the
    epoch after it. If an earlier one is read on, those begun since were nested in it: it is the main one again, as if
    they had never begun.

    The position is that of the iteration of this process from which the last batch was taken, of those that are still
    held: a nested one that is dropped gives it back. If none is held, it is that of the main one.
    """

    def __init__(self, notes: SharedNotes, epochs: Epochs) -> None:
        self.notes = notes  # shared by these processes
        self._epochs = epochs  # decides with the other ranks which epoch follows one that was ended early
        self._set_here: int | None = None  # epoch set by this process or before it was started
        self._loaded_here: Sequence[Saved] = ()  # loaded by this worker, for its next iteration
        self._iterations = 0  # number begun by this worker
        self._followed = -1  # number of changes of another bookmark that this one has followed
        self._loads = 0  # number of states loaded
        self._forget()

    def _forget(self) -> None:
        self._main: Iteration | None = None
        self._begun: list[Iteration] = []  # by this process; last the one that began, or was read, last

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_main": None, "_begun": []}

    def __repr__(self) -> str:
        return f"Bookmark(next={self.next_epoch}, loaded={len(self._loaded_here)})"

    @property
    def next_epoch(self) -> int:
        """The epoch that an iteration would read if it began now."""
        notes = self.notes.read()
        if "set" in notes:
            return int(notes["set"])
        return self._loaded_here[0].epoch if self._loaded_here else int(notes.get("next", 0))

    @property
    def workers(self) -> int:
        """Number of workers of the loader that began the last iteration; 0 if it was begun without workers."""
        return int(self.notes.read().get("workers", 0))

    @property
    def current(self) -> Iteration | None:
        """The iteration of this process whose position is the dataset's; None if that is where the next one begins."""
        held = self._held()
        if held:
            return held[-1]
        return self._main if self._main is not None and self._main.pid == os.getpid() else None

    def _held(self) -> list[Iteration]:
        """Return the iterations of this process that have neither ended nor been dropped, in the order of `_begun`."""
        return [each for each in self._begun if each.live and each.pid == os.getpid()]

    def next_states(self) -> tuple[Sequence[Saved], int]:
        """Return the states that the next iteration resumes from, if any, and the worker that has its first turn."""
        return (self._loaded_here, 0) if self._loaded_here else _states(self.notes.read(), self.next_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads; one that is held keeps the position."""
        self._set_here = epoch
        self._begun = self._held()
        self._main = None
        self._change({"set": epoch})

    def load(self, data: object, *, worker: bool) -> None:
        """Resume from a structure of states at the next iteration. Raises ConfigError if there is none.

        A `worker` of a DataLoader loads for itself only, any other process for all future readers.
        """
        states = find_states(data)
        if worker:
            self._forget()
            self._loaded_here = states
            return
        epoch, over = states[0].epoch, all(state.over for state in states)
        loaded = {"epoch": epoch, "over": over, "states": [state.to_json() for state in states]}
        loaded["turn"] = 0 if over else find_turn(data)
        self._set_here = None
        self._loads += 1
        self._forget()
        self._change({"next": epoch + over, "loaded": loaded, "workers": 0})

    def follow(self, other: "Bookmark") -> bool:
        """Continue where another bookmark does if an epoch was set or a state loaded there since; return True if so."""
        notes = other.notes.read()
        before, self._followed = self._followed, notes.get("changes", 0)
        if before == self._followed:
            return False
        if notes.get("loaded_in", 0) <= before:
            self.set_epoch(notes["set"])  # the state that was loaded earlier may have been read since
            return True
        self._set_here = notes.get("set")
        self._loads += 1
        self._forget()
        names = ["set", "seeds", "explained"] + ["loaded"] * ("taken" not in notes.get("loaded", {}))
        self._change({"next": notes.get("next", 0)} | {name: notes[name] for name in names if name in notes})
        return True

    def _change(self, changes: Notes) -> None:
        """Set the epoch or load a state; no iteration that has begun counts from now on, but workers may join it."""
        with self.notes.edit() as notes:
            notes.pop("main", None)
            for each in notes.get("iterations", []):
                each["look"] = True
            notes["changes"] = notes.get("changes", 0) + 1
            if "next" in changes:
                notes.pop("set", None)
                notes.pop("loaded", None)
                notes["loaded_in"] = notes["changes"]
            notes |= changes

    def begin(self, iteration: Iteration) -> None:
        """Begin an iteration, or join the one that another worker has begun; set its epoch, states and turn."""
        own, self._loaded_here = self._loaded_here, ()
        self._iterations += iteration.loader is not None
        # The number of this worker's iteration, too: a persistent worker that starts late may begin its first one after
        # the others have begun their second.
        reader = None if iteration.loader is None else [iteration.loader, self._iterations]
        with self.notes.turn():  # the first worker may wait for other ranks, the others for the first
            with self.notes.edit() as notes:
                begun = _join(notes, reader, iteration.worker)
            if begun is None:
                begun = self._begin_first(iteration, reader, own[0].epoch if own else None)
        iteration.epoch = begun["epoch"]
        iteration.is_set = begun["set"]
        iteration.number = begun["number"]
        iteration.pid = os.getpid()
        iteration.loads = self._loads
        if iteration.loader is not None:
            self._main = iteration
        else:
            self._move_last(iteration)
        if own and own[0].epoch == iteration.epoch:
            iteration.states = own
        else:
            with self.notes.edit() as notes:
                notes["workers"] = 0 if iteration.loader is None else iteration.workers
                iteration.states, iteration.turn = _states(notes, iteration.epoch, iteration.number)

    def _begin_first(self, iteration: Iteration, reader: Any, loaded: int | None) -> Notes:
        notes = self.notes.read()
        # For a worker's first iteration, the one set when it was started: the trainer may set another before the last
        # of a loader's workers begins.
        chosen = self._set_here if self._iterations == 1 else notes.get("set")
        epoch = notes.get("next", 0)
        main = _find(notes, notes.get("main"))
        is_held = False
        if loaded is not None and chosen in (None, loaded):
            epoch = loaded
        elif chosen is not None:
            epoch = chosen
        elif main is not None and len(main["read"]) < main["workers"]:
            is_held = self._is_live(main, iteration.loader)
            epoch = self._epochs.follows(epoch, main["epoch"], is_held=is_held)
        begun = {"epoch": epoch, "reader": reader, "look": False, "set": chosen is not None, "pid": os.getpid()}
        begun |= {"workers": iteration.workers, "joined": [iteration.worker], "read": []}
        with self.notes.edit() as notes:
            notes["begun"] = begun["number"] = notes.get("begun", 0) + 1
            if chosen is None and not is_held:
                notes["next"] = epoch
            known = notes.get("iterations", [])
            kept = [each for each in known[:-_MAX_REMEMBERED] if each["number"] == notes.get("main")]
            notes["iterations"] = [*kept, *known[-_MAX_REMEMBERED:], begun]
        return begun

    def _is_live(self, main: Notes, loader: int | None) -> bool:
        """Return True if the main iteration is still being read, but for a loader that begins its next one."""
        if main["reader"] is None:
            found = self._main
            return found is not None and (found.number, found.pid) == (main["number"], os.getpid()) and found.live
        if len(main["read"]) == main["workers"] or main["reader"][0] == loader:
            return False
        try:
            os.kill(main["pid"], 0)
        except ProcessLookupError:
            return False
        return True

    def take(self, iteration: Iteration) -> None:
        """Note that a batch is taken from an iteration of this process, whose position is the dataset's from now on.

        Raises ConfigError if a state was loaded since it began.
        """
        if self.is_outdated(iteration):
            raise ConfigError(
                "a state was loaded while this iterator was being read, and it would go on where it was",
                remedy="load the state before the loop; or begin another one, which resumes from the state",
            )
        if self._begun and self._begun[-1] is iteration:
            return
        self._move_last(iteration)
        if iteration.counted:
            self.count(iteration)

    def is_outdated(self, iteration: Iteration) -> bool:
        """Return True if a state was loaded since the iteration began."""
        return iteration.loads != self._loads

    def _move_last(self, iteration: Iteration) -> None:
        self._begun = [each for each in self._held() if each is not iteration]
        self._begun.append(iteration)

    def count(self, iteration: Iteration) -> None:
        """Count an iteration, of which the second batch is requested or the last one was taken, or which is read on.

        It becomes the main one, unless it was nested in another that was read on, or has been overtaken.
        """
        if iteration.looks:
            return
        with self.notes.turn():
            notes = self.notes.read()
            found = _find(notes, iteration.number)
            if found is None or found["look"] or (not iteration.counted and _is_overtaken(notes, found)):
                iteration.looks = True
                return
            if notes.get("main") != iteration.number:
                self._epochs.begin(None if iteration.is_set else iteration.epoch)
                with self.notes.edit() as notes:
                    _count(notes, iteration)
        self._main, iteration.counted = iteration, True

    def leave(self, iteration: Iteration) -> None:
        """Note that an iteration of this process was dropped before its end."""
        counts = iteration.counted and not (iteration.looks or iteration.is_set or iteration.done)
        is_nested = any(each is not iteration for each in self._held())
        if counts and iteration.loader is None and not is_nested and not sys.is_finalizing():
            self._epochs.leave(iteration.epoch)

    def finish(self, iteration: Iteration) -> None:
        """Note that this process has yielded the last sample of its part."""
        iteration.done = True
        with self.notes.edit() as notes:
            found = _find(notes, iteration.number)
            if found is None:
                return
            found["read"] = sorted({*found["read"], iteration.worker})
            if len(found["read"]) < found["workers"]:
                return
        self.count(iteration)  # whichever number its last batch has: a loop that counts takes no other
        if not iteration.looks and not iteration.is_set:
            self._epochs.end(iteration.epoch)


def _states(notes: Notes, epoch: int, number: int | None = None) -> tuple[Sequence[Saved], int]:
    """Return the loaded states for an epoch, unless an iteration of another number has read from there."""
    loaded = notes.get("loaded")
    if loaded is None or loaded["epoch"] != epoch or loaded.get("taken", number) != number:
        return (), 0
    return find_states(loaded["states"]), loaded["turn"]


def _find(notes: Notes, number: int | None) -> Notes | None:
    return next((each for each in notes.get("iterations", []) if each["number"] == number), None)


def _join(notes: Notes, reader: Any, worker: int) -> Notes | None:
    """Add the worker to the iteration that its loader has begun, and return that; None if there is none."""
    for each in reversed(notes.get("iterations", [])):  # an abandoned loader may have had the same number as this one
        if reader is not None and each["reader"] == reader and worker not in each["joined"]:
            each["joined"].append(worker)
            found: Notes = each
            return found
    return None


def _is_overtaken(notes: Notes, found: Notes) -> bool:
    """Return True if another iteration has read the epoch of this one to its end, or a later epoch."""
    main = _find(notes, notes.get("main"))
    if main is None or main["number"] < found["number"] or found["set"]:
        return False
    return bool(main["epoch"] > found["epoch"] or len(main["read"]) == main["workers"])


def _count(notes: Notes, iteration: Iteration) -> None:
    for each in notes["iterations"]:
        each["look"] = each["look"] or each["number"] > iteration.number
    notes["main"] = iteration.number
    if not iteration.is_set:
        notes["next"] = iteration.epoch + 1
    loaded = notes.get("loaded")
    if loaded and loaded["epoch"] == iteration.epoch:
        loaded.setdefault("taken", iteration.number)
    elif loaded and loaded["over"]:
        del notes["loaded"]  # if that epoch is set from now on, it is to be read whole


@dataclass(eq=False, repr=False)
class RankPosition:
    """The states of a rank's workers after the batches that the training loop has taken from them."""

    _states: list[ReaderState]  # of all workers, first those at the start of the iteration
    _left: Callable[[ReaderState], int]  # returns the number of samples that a worker has left after a state
    _ends_together: Callable[[], bool]  # returns True if all ranks end after the same number of batches
    _next_worker: int
    _batching: tuple[int, bool]  # size of the loader's batches, and True if it drops short ones
    _ended: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        return f"RankPosition(epoch={self.epoch}, next_worker={self._next_worker}, ended={self._ended})"

    @property
    def epoch(self) -> int:
        """The epoch that is being read."""
        return self._states[0].epoch

    def note(self, state: ReaderState) -> None:
        """Note the state of the worker that has made the batch just taken."""
        worker = state.reader % len(self._states)
        self._states[worker] = state
        self._next_worker = (worker + 1) % len(self._states)

    def end(self) -> None:
        """Note that there are no more batches."""
        self._ended = True

    def to_json(self) -> dict[str, Any]:
        """Return the states of all workers, and the worker whose turn is next, as a JSON object."""
        ended = self.is_read
        over = ended and self._ends_together()
        workers = []
        for state in self._states:
            marked = replace(state, over=over, in_step=state.in_step, ended=ended)
            workers.append(marked.to_json())
        return {"workers": workers, "turn": 0 if over else self._next_worker}

    @property
    def is_read(self) -> bool:
        """True if there are known to be no more batches."""
        return self._ended or all(state.ended for state in self._states)

    @property
    def batches_left(self) -> int:
        """Number of batches that are left, if the samples are counted; at most so many with a filter."""
        size, drop_last = self._batching
        return sum(left // size if drop_last else -(-left // size) for left in map(self._left, self._states))
