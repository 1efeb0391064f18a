"""A dataset's position: the epoch of the next iteration, and the states from which it resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.order.state import ReaderState, find_states, find_turn
from shardcache_client.sharing.epoch import Agree, EpochCounter, by_own_count
from shardcache_client.sharing.shared_state import SharedState


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of a process among the workers of a DataLoader.

    Attributes:
        number: shared by all workers that the loader started together.
    """

    number: int
    worker: int
    workers: int


class Bookmark:
    """Position of a dataset, shared by a trainer and its workers, except for states that a worker loads itself.

    Args:
        shared_state: the shared state.
        datasets: identifiers in states of this dataset, for counted samples (True) and uncounted shards (False).
    """

    def __init__(self, shared_state: SharedState, datasets: Mapping[bool, str]) -> None:
        self.datasets = datasets
        self._shared_state = shared_state
        self._epochs = EpochCounter(shared_state)
        self._loaded_here: Sequence[ReaderState] = ()  # loaded by this worker, for its next iteration
        # Pid, and the states from which that process began its current iteration; a forked child has begun none.
        self._begun: tuple[int, Sequence[ReaderState]] | None = None
        self._turn = 0
        self._iterations = 0  # number begun by this worker

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
    def epoch_begun(self) -> int:
        """The epoch begun last, or else the next one."""
        epoch: int = self._shared_state.read().get("begun_epoch", self.next_epoch)
        return epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on."""
        self._epochs.set(epoch)

    def begin(self, loader: WorkerPlace | None, agree: Agree = by_own_count) -> int:
        """Begin an iteration in this process and return its epoch.

        Args:
            loader: this process's place in its loader; None if it is not a worker.
            agree: as for `EpochCounter`.
        """
        own, self._loaded_here = self._loaded_here, ()
        self._iterations += loader is not None
        chosen = self._epochs.chosen(iteration=self._iterations if loader else 0)
        if own and chosen in (None, own[0].epoch):
            epoch = own[0].epoch
            self._epochs.passed(agree, epoch, *((loader.number, loader.workers) if loader else ()))
        else:
            own = ()
            if loader is None:
                epoch = self._epochs.begin(agree)
            else:
                epoch = self._epochs.join(
                    loader.number, loader.worker, loader.workers, agree, iteration=self._iterations
                )
        with self._shared_state.edit() as notes:
            notes |= {
                "begun_epoch": epoch,
                "loader": loader and loader.number,
                "workers": loader.workers if loader else 0,
            }
            taken = _take(notes, epoch, loader)
            self._begun = os.getpid(), own or taken
            same_workers = bool(taken) and loader is not None and taken[0].cut.workers == loader.workers
            self._turn = notes["loaded"]["turn"] if same_workers and not own else 0
        return epoch

    @property
    def turn(self) -> int:
        """Number of the worker that has the first turn in the iteration that this process has begun."""
        return self._turn

    def finish(self, epoch: int, loader: WorkerPlace | None) -> None:
        """Note that this process has yielded the last sample of its part of the iteration."""
        self._epochs.finish(epoch, *((loader.number, loader.worker) if loader else ()))

    @property
    def batching(self) -> tuple[int, bool] | None:
        """Batch size and drop_last of the loader that reads; None if unknown."""
        found = self._shared_state.read().get("batching")
        return None if found is None else (found[0], found[1])

    def note_batching(self, batching: tuple[int, bool] | None) -> None:
        """Note the batch size and drop_last of the loader that has begun to read."""
        if batching != self.batching:
            with self._shared_state.edit() as notes:
                notes["batching"] = batching

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
        self._begun = None
        if worker:
            self._loaded_here = states
            return
        epoch = states[0].epoch
        over = all(state.over for state in states)
        next_epoch = epoch + over
        self._epochs.go_on(next_epoch)
        with self._shared_state.edit() as notes:
            turn = 0 if over else find_turn(data)
            loaded = {"epoch": epoch, "over": over, "states": [state.to_json() for state in states], "turn": turn}
            notes |= {"workers": 0, "begun_epoch": next_epoch, "loaded": loaded}

    @property
    def states(self) -> Sequence[ReaderState]:
        """States from which this process reads the epoch that it has begun, or else would read the next one."""
        if self._begun is not None and self._begun[0] == os.getpid():
            return self._begun[1]
        return self._loaded_here or self.states_of_workers

    @property
    def states_of_workers(self) -> Sequence[ReaderState]:
        """States from which the loader's workers read the epoch that they have begun, or would read the next one."""
        notes = self._shared_state.read()
        loaded = notes.get("loaded")
        if loaded is None or loaded.get("loader", notes.get("loader")) != notes.get("loader"):
            return ()
        return find_states(loaded["states"])

    def next_states(self) -> tuple[Sequence[ReaderState], int]:
        """Return the states that the next iteration resumes from, if any, and the worker that has its first turn."""
        notes = self._shared_state.read()
        loaded = notes.get("loaded")
        if loaded is None or "loader" in loaded or loaded["epoch"] != self.next_epoch:
            return (), 0
        return find_states(loaded["states"]), loaded["turn"]


def _take(notes: dict[str, Any], epoch: int, loader: WorkerPlace | None) -> Sequence[ReaderState]:
    """Return the states loaded for an epoch, once: for its first iteration, to each worker of that."""
    loaded = notes.get("loaded")
    if loaded is None or loaded["epoch"] != epoch:
        if loaded and loaded["over"]:
            del notes["loaded"]  # if that epoch is set from now on, it is to be read whole
        return ()
    states = find_states(loaded["states"])
    if loader is None:
        del notes["loaded"]
        return states
    joined = loaded.setdefault("joined", [])
    if loaded.setdefault("loader", loader.number) != loader.number or loader.worker in joined:
        return ()
    joined.append(loader.worker)
    return states
