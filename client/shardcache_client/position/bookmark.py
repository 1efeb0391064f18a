"""A dataset's position: its iterations, the epoch of the next one, and the states from which it resumes."""

import json
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.position.state import Saved, find_states
from shardcache_client.ranks.group import Epochs
from shardcache_client.sharing.epoch_counter import Count, EpochCounter, Pass


@dataclass(slots=True, eq=False)
class Iteration:
    """One iteration over a dataset, in the process that reads it.

    Attributes:
        loader: a number shared by the workers that a DataLoader started together; None elsewhere.
        epoch: that it reads.
        states: from which it resumes; none if it reads the epoch from its beginning.
        is_set: True if the epoch was set, not counted.
        place: tracks its position.
        done: True if nothing of it is left.
        ended: True once it was read to its end.
        counted: True once it was the main one.
        looks: True if it can be the main one no more, as others have read later epochs.
        number: of this process's iterations, from 1; of a worker, from its first in this loader.
        loads: number of states loaded before it began.
    """

    loader: int | None = None
    worker: int = 0
    workers: int = 1
    epoch: int = 0
    states: Sequence[Saved] = ()
    is_set: bool = False
    place: Any = None
    done: bool = False
    ended: bool = False
    counted: bool = False
    looks: bool = False
    number: int = 0
    loads: int = 0
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
    """Position of a dataset in this process, and the count of epochs that it shares with DataLoader workers.

    The main iteration is the one from which the last batch was taken, from its second batch on, or its last. The next
    one reads the epoch after it. Until then an iteration is a look: whatever else is read, the next one begins where it
    has begun. The position is that of the main one, or of a look that was read last and is still held.

    Of a plain DataLoader, nobody knows which batches were taken. Each of its iterations counts from its beginning: an
    epoch that is left out costs nothing, one that is read twice does.
    """

    def __init__(self, counter: EpochCounter, epochs: Epochs) -> None:
        self.counter = counter  # shared with workers
        self._epochs = epochs  # decides with the other ranks which epoch follows one that was ended early
        self.seeds: Mapping[str, int] = {}  # of the state that was loaded last, as in a state
        self._states: Sequence[Saved] = ()  # loaded last, in this process or before it was started
        self._loads = 0  # number of states loaded so far
        self._is_own = False  # True in a worker that has loaded a state itself, for its next iteration alone
        self._chosen = -1  # epoch set by this process, or before it was started; -1 if none was
        self._changes = 0  # number of epochs set and states loaded
        self._loaded_at = 0  # that of the last load
        self._followed = -1  # number of another bookmark's changes that this one has followed
        self._pid = os.getpid()
        self._iterations = 0  # begun by this process
        self._forget()

    def _forget(self) -> None:
        self._main: Iteration | None = None
        self._begun: list[Iteration] = []  # last the one that began, or was read, last

    def _enter_process(self) -> None:
        """Forget the iterations of the process that has forked this one."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._iterations = 0
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_main": None, "_begun": [], "_pid": 0}

    def __repr__(self) -> str:
        return f"Bookmark(next={self.next_epoch}, loaded={len(self._states)})"

    @property
    def next_epoch(self) -> int:
        """The epoch that an iteration would read if it began now."""
        count = self.counter.read()
        if count.chosen >= 0:
            return count.chosen
        return self._states[0].epoch if self._is_own else count.next

    @property
    def chosen(self) -> int | None:
        """The epoch that was set, which every iteration reads."""
        chosen = self.counter.read().chosen
        return chosen if chosen >= 0 else None

    @property
    def workers(self) -> int:
        """Number of workers of the loader that began the last iteration; 0 if it was begun without workers."""
        return self.counter.read().workers

    @property
    def current(self) -> Iteration | None:
        """The iteration of this process whose position is the dataset's; None if that is where the next one begins."""
        self._enter_process()
        held = self._held()
        return held[-1] if held else self._main

    def _held(self) -> list[Iteration]:
        """Return the iterations of this process that have neither ended nor been dropped, in the order of `_begun`."""
        return [each for each in self._begun if each.live]

    def next_states(self) -> Sequence[Saved]:
        """Return the states that the next iteration resumes from, if any."""
        return self._states_for(self.next_epoch, self.counter.read())

    def _states_for(self, epoch: int, count: Count) -> Sequence[Saved]:
        if not self._states or self._states[0].epoch != epoch:
            return ()
        return self._states if self._is_own or not count.is_resumed else ()

    # What users set

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads; one that is held keeps the position."""
        self._begun = self._held()
        self._main = None
        self._changes += 1
        self._chosen = epoch
        with self.counter.change() as count:
            count.chosen = epoch

    def load(self, data: object, *, worker: bool) -> None:
        """Resume from a structure of states at the next iteration. Raises ConfigError if there is none.

        A `worker` of a DataLoader loads for itself only, any other process for all future readers.
        """
        states = find_states(data)
        self._forget()
        self._states = states
        self.seeds = states[0].seeds
        self._is_own = worker
        if worker:
            return
        self._changes += 1
        self._loads += 1
        self._loaded_at = self._changes
        self._chosen = -1
        self._hold_states()
        with self.counter.change() as count:
            is_over = all(state.over for state in states)
            count.next = states[0].epoch + is_over
            count.chosen = -1
            count.loads = self._loads
            count.is_resumed = False
            count.workers = 0

    def _hold_states(self) -> None:
        self.counter.hold_loaded(json.dumps([state.to_json() for state in self._states]).encode())

    def forget_states(self) -> None:
        """Resume from no state that was loaded."""
        self._states = ()

    def follow(self, other: "Bookmark") -> bool:
        """Continue where another bookmark does if an epoch was set or a state loaded there since; return True if so."""
        before = self._followed
        self._followed = other._changes
        if before == self._followed:
            return False
        chosen = other.chosen
        if other._loaded_at <= before:
            assert chosen is not None
            self.set_epoch(chosen)  # the state that was loaded earlier may have been read since
            return True
        theirs = other.counter.read()
        self._forget()
        self._states = () if theirs.is_resumed else other._states
        self._is_own = False
        self._changes += 1
        self._loads += 1
        self._loaded_at = self._changes
        self._chosen = -1 if chosen is None else chosen
        self.seeds = other.seeds
        self._hold_states()
        with self.counter.change() as count:
            count.next = theirs.next
            count.chosen = self._chosen
            count.loads = self._loads
            count.is_resumed = False
            count.is_explained |= theirs.is_explained
        return True

    # Iterations

    def begin(self, iteration: Iteration) -> None:
        """Begin an iteration: set its epoch and states."""
        self._enter_process()
        self._iterations += 1
        iteration.number = self._iterations
        iteration.loads = self._loads
        if iteration.loader is None:
            self._begin_here(iteration)
            self._move_last(iteration)
        else:
            self._begin_in_worker(iteration, iteration.loader)
            self._main = iteration
        self._is_own = False

    def _begin_here(self, iteration: Iteration) -> None:
        count = self.counter.read()
        main = self._main
        epoch = count.next
        if count.chosen >= 0:
            epoch = count.chosen
            iteration.is_set = True
        elif main is not None and main.counted and not main.done and not main.is_set:
            is_held = main.live
            epoch = self._epochs.follows(epoch, main.epoch, is_held=is_held)
            if not is_held:
                with self.counter.change() as count:
                    count.next = epoch
        iteration.epoch = epoch
        iteration.states = self._states_for(epoch, count)
        with self.counter.change() as count:
            count.workers = 0

    def _begin_in_worker(self, iteration: Iteration, loader: int) -> None:
        """Begin a worker's part of an iteration, which others of the same loader may have begun."""
        nth = iteration.number
        with self.counter.turn():  # the first worker may wait for other ranks, the others for the first
            count = self.counter.read()
            found = _joined(count, loader, nth, iteration.worker)
            if self._loads != count.loads and not self._is_own:
                self._hear_of_load(count.loads)
            if found is None:
                found = self._begin_pass(iteration, loader, nth, count)
            else:
                iteration.is_set = count.chosen == found.epoch
            with self.counter.change() as count:
                latest = _find(count, loader, nth)
                latest.joined |= 1 << iteration.worker
                count.workers = iteration.workers
            iteration.epoch = found.epoch
        if found.is_resuming or (self._is_own and self._states[0].epoch == found.epoch):
            iteration.states = self._states
        if self._is_own:
            self._states = ()

    def _hear_of_load(self, loads: int) -> None:
        """Take the states that the trainer has loaded since this worker was started."""
        states = json.loads(self.counter.loaded())
        self._loads = loads
        self._states = find_states(states) if states else ()
        if self._states:
            self.seeds = self._states[0].seeds

    def _begin_pass(self, iteration: Iteration, loader: int, nth: int, count: Count) -> Pass:
        """Begin an iteration by its first worker, and count it."""
        # In a worker's first iteration, the epoch that was set when it was started: the trainer may set another one
        # before the first worker begins.
        chosen = self._chosen if nth == 1 else count.chosen
        last = count.passes[-1] if count.passes else None
        epoch = count.next
        if self._is_own and chosen in (-1, self._states[0].epoch):
            epoch = self._states[0].epoch
        elif chosen >= 0:
            epoch = chosen
        elif last is not None and last.epoch + 1 == epoch and not last.is_read:
            is_held = last.loader != loader and _is_running(last.pid)
            epoch = self._epochs.follows(epoch, last.epoch, is_held=is_held)
        iteration.is_set = chosen >= 0
        self._epochs.begin(None if iteration.is_set else epoch)
        begun = Pass(loader, nth, epoch, iteration.workers, os.getpid())
        with self.counter.change() as count:
            if not self._is_own and self._states_for(epoch, count):
                begun.is_resuming = True
                count.is_resumed = True
            if not iteration.is_set:
                count.next = epoch + 1
            count.passes = [*count.passes, begun]
        return begun

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
        """Make an iteration of this process the main one: its second batch or its last was taken, or a later one.

        One that was not before others have read later epochs stays a look.
        """
        main = self._main
        if iteration.looks or main is iteration or self.is_outdated(iteration):
            return
        if main is not None and not iteration.counted and main.epoch > iteration.epoch and not iteration.is_set:
            iteration.looks = True
            return
        self._epochs.begin(None if iteration.is_set else iteration.epoch)
        self._main = iteration
        iteration.counted = True
        with self.counter.change() as count:
            if not iteration.is_set:
                count.next = iteration.epoch + 1
            if self._states and (self._states[0].epoch == iteration.epoch or self._states[0].over):
                count.is_resumed = True

    def leave(self, iteration: Iteration) -> None:
        """Note that an iteration of this process was dropped before its end."""
        counts = iteration.counted and not (iteration.looks or iteration.is_set or iteration.done)
        is_nested = any(each is not iteration for each in self._held())
        if counts and iteration.loader is None and not is_nested and not sys.is_finalizing():
            self._epochs.leave(iteration.epoch)

    def finish(self, iteration: Iteration) -> None:
        """Note that this process has yielded the last sample of its part."""
        iteration.done = True
        if iteration.loader is None:
            self.count(iteration)  # whichever number its last batch has: a loop that counts takes no other
            is_read = not iteration.looks
        else:
            with self.counter.change() as count:
                found = _find(count, iteration.loader, iteration.number)
                found.read |= 1 << iteration.worker
                is_read = found.is_read
        if is_read and not iteration.is_set:
            self._epochs.end(iteration.epoch)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _find(count: Count, loader: int, nth: int) -> Pass:
    """Return the latest pass of a loader's workers; an abandoned loader may have had the same number."""
    for each in reversed(count.passes):
        if (each.loader, each.nth) == (loader, nth):
            return each
    return Pass(loader, nth, 0, 1, 0)  # forgotten, as many others have begun since


def _joined(count: Count, loader: int, nth: int, worker: int) -> Pass | None:
    """Return the pass that other workers of a loader have begun, and this one has not; None if there is none."""
    for each in reversed(count.passes):
        if (each.loader, each.nth) == (loader, nth) and not each.joined >> worker & 1:
            return each
    return None
