"""A dataset's position: the iterations over it, the epoch that follows, and the states to resume.

- An iteration is one loop over the dataset in one process.
- A pass is one loop over a DataLoader. Each of its workers has an iteration of its own.
- The trainer is the process that runs the training loop, and starts the workers.
- A state is what `state_dict()` returns.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.position.iterations import Iteration
from shardcache_client.position.mixture_state import Terms
from shardcache_client.position.state import SavedState, find_states
from shardcache_client.ranks.group import Epochs
from shardcache_client.sharing.epoch_counter import Count, EpochCounter, Pass


class Bookmark:
    """Position of a dataset in this process.

    An iteration begins as a look, which does not count as reading the epoch: the next iteration
    begins where the look began. It becomes the main iteration once the user takes its second batch,
    or its last batch. The next iteration then reads the epoch after the main iteration's. The
    dataset's position is that of the main iteration, or of a look that was read after it and has
    neither ended nor been dropped.

    In a worker of a plain DataLoader, it is unknown which batches the user has taken. So each
    iteration there is the main iteration from its beginning. A look then skips an epoch, which does
    less harm than reading an epoch twice.

    Attributes:
        counter: the count of epochs, shared with DataLoader workers.
        terms: the drawn seeds and the mixture's change, from the states loaded last.
        states: the states loaded last, in this process or before it was started.
        changes: number of times that an epoch was set or states were loaded.
        loaded_at: value of `changes` after the last load.
        latest: the iteration that `take` has recorded as the one read last. While a batch is taken
            from the same iteration, `take` need not be called again. None if it has to be called.
    """

    def __init__(self, counter: EpochCounter, epochs: Epochs) -> None:
        self.counter = counter
        self._epochs = epochs  # agrees with other ranks on what follows an epoch ended early
        self.terms = Terms()
        self.states: Sequence[SavedState] = ()
        self._loads = 0  # number of times that states were loaded
        # True in a worker that has loaded states itself. Only its next iteration uses them.
        self._has_own_states = False
        # The epoch that the user has set in this process, or before it was started; -1 if none.
        self._chosen = -1
        self.changes = 0
        self.loaded_at = 0
        # `changes` of another bookmark when `follow` was last called.
        self._followed_changes = -1
        self._pid = os.getpid()  # the process that has begun the iterations
        self._iterations = 0  # number of iterations begun by this process
        self._forget_iterations()

    def _forget_iterations(self) -> None:
        """Forget all iterations, so that none of them has the dataset's position."""
        self._main: Iteration | None = None
        self._begun: list[Iteration] = []  # in the order in which they began or were last read
        self.latest: Iteration | None = None

    def _forget_parents_iterations(self) -> None:
        """Forget the iterations of the process that has forked this one, or pickled this object."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._iterations = 0
            self._forget_iterations()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_main": None, "_begun": [], "latest": None, "_pid": 0}

    def __repr__(self) -> str:
        return f"Bookmark(next={self.next_epoch}, loaded={len(self.states)})"

    @property
    def next_epoch(self) -> int:
        """The epoch that an iteration would read if it began now."""
        count = self.counter.read()
        if count.chosen >= 0:
            return count.chosen
        return self.states[0].epoch if self._has_own_states else count.next

    @property
    def chosen(self) -> int | None:
        """The epoch that the user has set, which every iteration reads; None if none is set."""
        chosen = self.counter.read().chosen
        return chosen if chosen >= 0 else None

    @property
    def workers(self) -> int:
        """Number of workers of the loader that began the last iteration; 0 if it has none."""
        return self.counter.read().workers

    @property
    def current(self) -> Iteration | None:
        """The iteration of this process whose position is the dataset's.

        None if the dataset's position is the place where the next iteration begins.
        """
        self._forget_parents_iterations()
        live = self._live_iterations()
        if live:
            return live[-1]
        return self._main

    def _live_iterations(self) -> list[Iteration]:
        """Return the iterations that have neither ended nor been dropped, in `_begun`'s order."""
        return [each for each in self._begun if each.live]

    def next_states(self) -> Sequence[SavedState]:
        """Return the states that the next iteration resumes from, if any."""
        return self._states_for(self.next_epoch, self.counter.read())

    def _states_for(self, epoch: int, count: Count) -> Sequence[SavedState]:
        """Return the states from which an iteration resumes an epoch; empty if it does not.

        Only the first iteration after a load resumes from the states.
        """
        if not self.states or self.states[0].epoch != epoch:
            return ()
        if count.is_resumed and not self._has_own_states:
            return ()
        return self.states

    # The epoch that the user sets, and the states that the user loads.

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads.

        An iteration that has neither ended nor been dropped keeps the dataset's position.
        """
        self._begun = self._live_iterations()
        self._main = None
        self.latest = None
        self.changes += 1
        self._chosen = epoch
        with self.counter.change() as count:
            count.chosen = epoch

    def load(self, data: object, *, in_worker: bool) -> None:
        """Resume from states at the next iteration. Raises ConfigError if there are none.

        Args:
            data: any nested structure that contains the states.
            in_worker: True in a worker of a DataLoader, which loads the states for itself only. Any
                other process loads them for its workers as well.
        """
        states = find_states(data)
        self._forget_iterations()
        self.states = states
        self.terms = states[0].terms
        self._has_own_states = in_worker
        if in_worker:
            return
        self._record_load(chosen=-1)
        with self.counter.change() as count:
            is_over = all(state.over for state in states)
            count.next = states[0].epoch + 1 if is_over else states[0].epoch
            count.chosen = -1
            count.loads = self._loads
            count.is_resumed = False
            count.workers = 0

    def _record_load(self, chosen: int) -> None:
        """Count a load of states, and keep the states for workers that are running already.

        These workers take the states once the caller has raised `Count.loads`.

        Args:
            chosen: the epoch that was set; -1 if none was.
        """
        self.changes += 1
        self._loads += 1
        self.latest = None
        self.loaded_at = self.changes
        self._chosen = chosen
        self.counter.store_states(json.dumps([state.to_json() for state in self.states]).encode())

    def forget_states(self) -> None:
        """Forget the loaded states, so that no iteration resumes from them."""
        self.states = ()

    def follow(self, other: "Bookmark") -> bool:
        """Take over the epoch that was set, or the states that were loaded, in another bookmark.

        Returns True if there is something new since the last call.
        """
        changes_before = self._followed_changes
        self._followed_changes = other.changes
        if other.changes == changes_before:
            return False
        chosen = other.chosen
        if other.loaded_at <= changes_before:
            # Since the last call, only an epoch was set. Earlier states are not taken over again,
            # as this bookmark may have resumed from them already.
            assert chosen is not None
            self.set_epoch(chosen)
            return True
        other_count = other.counter.read()
        self._forget_iterations()
        self.states = () if other_count.is_resumed else other.states
        self._has_own_states = False
        self.terms = other.terms
        self._record_load(chosen=-1 if chosen is None else chosen)
        with self.counter.change() as count:
            count.next = other_count.next
            count.chosen = self._chosen
            count.loads = self._loads
            count.is_resumed = False
            count.is_uncounted_logged |= other_count.is_uncounted_logged
        return True

    # Iterations.

    def begin(self, iteration: Iteration) -> None:
        """Begin an iteration: set its epoch, and the states from which it resumes."""
        self._forget_parents_iterations()
        self._iterations += 1
        iteration.number = self._iterations
        iteration.loads = self._loads
        if iteration.loader is None:
            self._begin_without_workers(iteration)
            self._move_to_end(iteration)
        else:
            self._begin_in_worker(iteration, iteration.loader)
            self._main = iteration
        self._has_own_states = False

    def settle_next_epoch(self) -> int:
        """Return the epoch that an iteration of this process reads if it begins now.

        It is the epoch that was set, or else the epoch after the main iteration's. If the main
        iteration was ended early, the ranks agree on the epoch; this may wait for other ranks.
        """
        count = self.counter.read()
        if count.chosen >= 0:
            return count.chosen
        main = self._main
        if main is None or main.is_epoch_set:
            return count.next
        was_ended_early = main.role == "main" and main.reading == "open"
        if not was_ended_early:
            return count.next

        # While the user holds the main iteration, it may be read on. So the epoch is not settled
        # for good.
        is_held = main.live
        epoch = self._epochs.epoch_after(main.epoch, counted_next=count.next, is_held=is_held)
        if not is_held:
            with self.counter.change() as count:
                count.next = epoch
        return epoch

    def _begin_without_workers(self, iteration: Iteration) -> None:
        """Begin an iteration that is not one of several workers' parts of a pass."""
        iteration.epoch = self.settle_next_epoch()
        count = self.counter.read()
        iteration.is_epoch_set = count.chosen >= 0
        iteration.states = self._states_for(iteration.epoch, count)
        with self.counter.change() as count:
            count.workers = 0

    def _begin_in_worker(self, iteration: Iteration, loader: int) -> None:
        """Begin a worker's part of a pass, which other workers of the loader may have begun."""
        # One worker at a time begins. The first one may wait for other ranks to agree on an epoch;
        # the others then wait for the first.
        with self.counter.turn():
            count = self.counter.read()
            if self._loads != count.loads and not self._has_own_states:
                self._take_trainers_states(count.loads)
            joined_pass = self._join_pass(iteration, loader, count)
        epoch = joined_pass.epoch
        iteration.epoch = epoch
        has_own_states_of_epoch = self._has_own_states and self.states[0].epoch == epoch
        if joined_pass.is_resuming or has_own_states_of_epoch:
            iteration.states = self.states
        if self._has_own_states:
            self.states = ()  # the states were for this iteration alone

    def _take_trainers_states(self, loads: int) -> None:
        """Take the states that the trainer has loaded since this worker was started.

        Args:
            loads: number of times that the trainer has loaded states.
        """
        states = json.loads(self.counter.stored_states())
        self._loads = loads
        self.latest = None
        self.states = find_states(states) if states else ()
        if self.states:
            self.terms = self.states[0].terms

    def _join_pass(self, iteration: Iteration, loader: int, count: Count) -> Pass:
        """Return the pass to which a worker's iteration belongs. Begin it if no worker has yet."""
        nth = iteration.number
        joined_pass = count.pass_to_join(loader, nth, iteration.worker)
        if joined_pass is None:
            joined_pass = self._begin_pass(iteration, loader, count)
        else:
            # A `Pass` does not record whether the user has set its epoch. It is assumed so if the
            # user has set the same epoch by now.
            iteration.is_epoch_set = count.chosen == joined_pass.epoch
        with self.counter.change() as count:
            count.pass_of(loader, nth).note_joined(iteration.worker)
            count.workers = iteration.workers
        return joined_pass

    def _begin_pass(self, iteration: Iteration, loader: int, count: Count) -> Pass:
        """Begin a pass, as its first worker, and count its epoch."""
        nth = iteration.number
        # A worker's first pass reads the epoch that was set when the worker was started, since the
        # trainer may set another epoch before the first worker begins.
        chosen = self._chosen if nth == 1 else count.chosen
        epoch = self._epoch_of_pass(loader, count, chosen)
        iteration.is_epoch_set = chosen >= 0
        self._begin_epoch(iteration, epoch)
        new_pass = Pass(loader, nth, epoch, workers=iteration.workers, pid=os.getpid())
        with self.counter.change() as count:
            if not self._has_own_states and self._states_for(epoch, count):
                new_pass.is_resuming = True
                count.is_resumed = True
            if not iteration.is_epoch_set:
                count.next = epoch + 1
            count.passes = [*count.passes, new_pass]
        return new_pass

    def _begin_epoch(self, iteration: Iteration, epoch: int) -> None:
        """Tell the other ranks which epoch an iteration reads."""
        # The ranks agree only on epochs that are counted, not on those that the user has set.
        self._epochs.begin(None if iteration.is_epoch_set else epoch)

    def _epoch_of_pass(self, loader: int, count: Count, chosen: int) -> int:
        """Return the epoch of a new pass of a loader's workers.

        Args:
            loader: number of the loader.
            count: the present count.
            chosen: the epoch that was set; -1 if none was.
        """
        # 1. This worker itself has loaded states, and no other epoch was set.
        if self._has_own_states and chosen in (-1, self.states[0].epoch):
            return self.states[0].epoch

        # 2. An epoch was set.
        if chosen >= 0:
            return chosen

        # 3. The latest pass read the previous epoch and was ended early: the ranks agree on the
        # epoch that follows. If the pass is another loader's, the user may still read on.
        last_pass = count.passes[-1] if count.passes else None
        if last_pass is not None and last_pass.epoch + 1 == count.next and not last_pass.is_read:
            is_held = last_pass.loader != loader and _is_running(last_pass.pid)
            return self._epochs.epoch_after(
                last_pass.epoch, counted_next=count.next, is_held=is_held
            )

        # 4. The pass reads the epoch after those that were read.
        return count.next

    def take(self, iteration: Iteration) -> None:
        """Record that a batch is taken from an iteration of this process.

        From now on, the iteration's position is that of the dataset.

        Raises ConfigError if a state was loaded since the iteration began.
        """
        if self.is_outdated(iteration):
            raise ConfigError(
                "a state was loaded while this iterator was being read, and the "
                "iterator would ignore it",
                remedy="load the state before the loop; or start another loop, which "
                "resumes from the state",
            )
        is_read_last = bool(self._begun) and self._begun[-1] is iteration
        if not is_read_last:
            # Other iterations were read within this iteration's loop, which now goes on.
            self._move_to_end(iteration)
            if iteration.role == "main":
                self.make_main(iteration)
        self.latest = iteration

    def is_outdated(self, iteration: Iteration) -> bool:
        """Return True if a state was loaded since the iteration began."""
        return iteration.loads != self._loads

    def _move_to_end(self, iteration: Iteration) -> None:
        """Record that an iteration has begun or was read later than all others."""
        self._begun = [each for each in self._live_iterations() if each is not iteration]
        self._begun.append(iteration)
        self.latest = None

    def make_main(self, iteration: Iteration) -> None:
        """Make an iteration of this process the main one, unless a later epoch is read already.

        To be called when the user takes the iteration's second batch, a later batch or its last
        batch.
        """
        main = self._main
        if iteration.role == "overtaken" or main is iteration or self.is_outdated(iteration):
            return
        is_counted_look = iteration.role == "look" and not iteration.is_epoch_set
        reads_later_epoch = main is not None and main.epoch > iteration.epoch
        if is_counted_look and reads_later_epoch:
            iteration.role = "overtaken"
            return
        self._begin_epoch(iteration, iteration.epoch)
        self._main = iteration
        iteration.role = "main"
        with self.counter.change() as count:
            if not iteration.is_epoch_set:
                count.next = iteration.epoch + 1
            # Later iterations do not resume from states of this epoch, or of an epoch that is over.
            if self.states and (self.states[0].epoch == iteration.epoch or self.states[0].over):
                count.is_resumed = True

    def leave(self, iteration: Iteration) -> None:
        """Record that an iteration of this process was dropped before its end."""
        is_counted_main = iteration.role == "main" and not iteration.is_epoch_set
        if not is_counted_main or iteration.reading != "open":
            return
        # Nothing is recorded if the epoch may still be read: by the other workers of the pass, or
        # in another iteration. Other ranks then wait a little longer, which does no harm.
        is_worker = iteration.loader is not None
        has_others = any(each is not iteration for each in self._live_iterations())
        if is_worker or has_others:
            return
        # The interpreter also closes generators when it ends, although no loop has left them.
        if not sys.is_finalizing():
            self._epochs.leave(iteration.epoch)

    def finish(self, iteration: Iteration) -> None:
        """Record that an iteration has yielded its last sample."""
        iteration.reading = "read"
        if iteration.loader is None:
            self.make_main(iteration)  # even if the last batch is the first one
            is_read = iteration.role != "overtaken"
        else:
            with self.counter.change() as count:
                current_pass = count.pass_of(iteration.loader, iteration.number)
                current_pass.note_read(iteration.worker)
                is_read = current_pass.is_read
        if is_read and not iteration.is_epoch_set:
            self._epochs.end(iteration.epoch)


def _is_running(pid: int) -> bool:
    """Return True if there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it runs as another user
    return True
