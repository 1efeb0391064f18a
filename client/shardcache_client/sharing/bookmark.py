"""A dataset's position: its iterations, the epoch of the next one, and the states from which it resumes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.order.state import ReaderState, find_states, find_turn
from shardcache_client.sharing.epoch import Agree, EpochCounter, WorkerPlace, by_own_count
from shardcache_client.sharing.shared_state import Notes, SharedState


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration over a dataset, in the process that reads it.

    Attributes:
        epoch: the epoch that it reads.
        states: states from which it resumes; none if it reads the epoch from its beginning.
        turn: number of the worker that has the first turn, if there are as many as there were.
        looks: True if it takes no part in the dataset's position, since another one is being read.
        is_set: True if the epoch was set, not counted.
        place: tracks its position.
        done: True if nothing of it is left.
        ended: True once it was read to its end.
        counted: True once it was the main one.
    """

    epoch: int = 0
    states: Sequence[ReaderState] = ()
    turn: int = 0
    looks: bool = False
    is_set: bool = False
    place: Any = None
    done: bool = False
    ended: bool = False
    counted: bool = False
    _number: int = 0
    _pid: int = 0
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

    It is that of the main iteration, or of one that may become it; see `EpochCounter`.

    Args:
        shared_state: the shared state.
        datasets: identifiers in states of this dataset, for counted samples (True) and uncounted shards (False).
    """

    def __init__(self, shared_state: SharedState, datasets: Mapping[bool, str]) -> None:
        self.datasets = datasets
        self._shared_state = shared_state
        self._epochs = EpochCounter(shared_state)
        self._loaded_here: Sequence[ReaderState] = ()  # loaded by this worker, for its next iteration
        self._iterations = 0  # number begun by this worker
        self._followed = -1  # number of changes of another bookmark that this one has followed
        self._forget()

    def _forget(self) -> None:
        self._main: Iteration | None = None
        self._begun: list[Iteration] = []  # since then, by this process

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_main": None, "_begun": []}

    def __repr__(self) -> str:
        return f"Bookmark(next={self.next_epoch}, loaded={len(self._loaded_here)})"

    @property
    def next_epoch(self) -> int:
        """The epoch that an iteration would read if it began now."""
        chosen = self._shared_state.read().get("chosen")
        if self._loaded_here and chosen is None:
            return self._loaded_here[0].epoch
        return self._epochs.next

    @property
    def workers(self) -> int:
        """Number of workers of the loader that began the last iteration; 0 if it was begun without workers."""
        workers: int = self._shared_state.read().get("workers", 0)
        return workers

    @property
    def current(self) -> Iteration | None:
        """The iteration of this process whose position is the dataset's; None if that is where the next one begins."""
        main = self._main if self._main is not None and self._main._pid == os.getpid() else None
        if main is None or main.done or not main.live:
            self._begun = [each for each in self._begun if each.live and not each.looks and each._pid == os.getpid()]
            return self._begun[-1] if self._begun else main
        return main

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on."""
        self._forget()
        self._epochs.set(epoch)
        self._changed()

    def begin(self, iteration: Iteration, loader: WorkerPlace | None = None, agree: Agree = by_own_count) -> None:
        """Begin an iteration in this process.

        Args:
            iteration: gets epoch, states and turn.
            loader: this process's place in its loader; None if it is not a worker.
            agree: as for `EpochCounter`.
        """
        own, self._loaded_here = self._loaded_here, ()
        self._iterations += loader is not None
        loaded, number = (own[0].epoch if own else None), (self._iterations if loader else 0)
        begun = self._epochs.begin(loader, agree, iteration=number, loaded=loaded, is_read=self._is_main_and_live)
        iteration.epoch, iteration.looks, iteration.is_set = begun["epoch"], begun["look"], begun["set"]
        iteration._number, iteration._pid = begun["number"], os.getpid()
        if loader is not None:
            self._main = iteration
        elif not iteration.looks:
            self._begun.append(iteration)
        if own and loaded == iteration.epoch:
            iteration.states = own
        else:
            iteration.states, iteration.turn = self._begin_from_loaded(iteration, loader)

    def _begin_from_loaded(self, iteration: Iteration, loader: WorkerPlace | None) -> tuple[Sequence[ReaderState], int]:
        if iteration.looks:
            return (), 0
        with self._shared_state.edit() as notes:
            notes["workers"] = loader.workers if loader else 0
            loaded = notes.get("loaded")
            if loaded is None or loaded.get("taken", iteration._number) != iteration._number:
                return (), 0
            if loaded["epoch"] != iteration.epoch:
                return (), 0
            return find_states(loaded["states"]), loaded["turn"]

    def _is_main_and_live(self, main: Notes) -> bool:
        found = self._main
        return found is not None and (found._number, found._pid) == (main["number"], os.getpid()) and found.live

    def count(self, iteration: Iteration, agree: Callable[[int], object] = lambda _: None) -> None:
        """Count an iteration, of which the second batch is asked for or the end was reached.

        Args:
            agree: as for `EpochCounter.count`.
        """
        if iteration.looks:
            return
        iteration.looks = not self._epochs.count(iteration._number, agree)
        if iteration.looks:
            return
        self._main, self._begun, iteration.counted = iteration, [], True
        with self._shared_state.edit() as notes:
            loaded = notes.get("loaded")
            if loaded and loaded["epoch"] == iteration.epoch:
                loaded.setdefault("taken", iteration._number)
            elif loaded and loaded["over"]:
                del notes["loaded"]  # if that epoch is set from now on, it is to be read whole

    def finish(self, iteration: Iteration, loader: WorkerPlace | None = None) -> bool:
        """Note that this process has yielded the last sample of its part; return True if all processes have."""
        iteration.done = True
        return self._epochs.finish(iteration._number, loader.worker if loader else 0)

    def load(self, data: object, *, worker: bool) -> None:
        """Resume from a state at the next iteration.

        Args:
            data: a result of `ReaderState.to_json`, or any structure with such states of several workers or ranks.
            worker: True in a DataLoader worker, which loads for itself only; otherwise for all future readers.

        Raises ConfigError if it contains no state, or one of another dataset.
        """
        states = find_states(data)
        if states[0].dataset != self.datasets.get(states[0].counted):
            raise ConfigError(
                "the state is from another dataset, or the numbers of samples in its shards have changed",
                remedy="create the dataset with the urls, seed, shuffle and samples_per_epoch of the run that saved it",
            )
        self._forget()
        if worker:
            self._loaded_here = states
            return
        epoch = states[0].epoch
        over = all(state.over for state in states)
        self._epochs.go_on(epoch + over)
        with self._shared_state.edit() as notes:
            turn = 0 if over else find_turn(data)
            loaded = {"epoch": epoch, "over": over, "states": [state.to_json() for state in states], "turn": turn}
            notes |= {"workers": 0, "loaded": loaded}
        self._changed("loaded_in")

    def _changed(self, what: str = "changes") -> None:
        with self._shared_state.edit() as notes:
            notes["changes"] = notes.get("changes", 0) + 1
            notes[what] = notes["changes"]

    def follow(self, other: Bookmark) -> bool:
        """Continue where another bookmark does, if an epoch was set or a state loaded there since the last call.

        Returns True if so.
        """
        notes = other._shared_state.read()
        changes = notes.get("changes", 0)
        if changes == self._followed:
            return False
        before, self._followed = self._followed, changes
        if notes.get("loaded_in", 0) <= before:
            self.set_epoch(notes["chosen"])  # the state that was loaded earlier may have been read since
            return True
        self._forget()
        with self._shared_state.edit() as own:
            begun = max(own.get("begun", 0), notes.get("begun", 0))
            own.clear()
            own |= {name: value for name, value in notes.items() if name not in ("main", "iterations")}
            own["begun"] = begun
        return True

    @property
    def states(self) -> Sequence[ReaderState]:
        """States from which this process would read its next iteration."""
        return self._loaded_here or self.next_states()[0]

    def next_states(self) -> tuple[Sequence[ReaderState], int]:
        """Return the states that the next iteration resumes from, if any, and the worker that has its first turn."""
        loaded = self._shared_state.read().get("loaded")
        if loaded is None or "taken" in loaded or loaded["epoch"] != self.next_epoch:
            return (), 0
        return find_states(loaded["states"]), loaded["turn"]
