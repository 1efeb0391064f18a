"""A dataset's iterations over its epochs, and the states from which they resume.

A reader, a dataset or a loader has one `EpochReader`, which has the dataset's position: a bookmark.
The bookmark says which epoch the next iteration reads, and from which states it resumes. Then
`DatasetEpochs` makes the iteration's run, which yields the samples of the epoch.

The terms are what determines a run's order in addition to its arguments: seeds that were drawn at
random, and the latest change of a mixture.

A wrapper, such as another library's loader, may divide the samples among ranks a second time.
`refuse_resharding` looks for wrappers on the call stack, so it is called wherever one may be there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.topology import Topology
from shardcache_client.parts.dataset_epochs import DatasetEpochs, EpochRun
from shardcache_client.parts.dataset_parts import DatasetParts
from shardcache_client.parts.runtime import Runtime
from shardcache_client.position.bookmark import Bookmark
from shardcache_client.position.iterations import Iteration
from shardcache_client.position.mixture_state import Terms
from shardcache_client.position.state import SavedState, find_states

log = logging.getLogger("shardcache")


class EpochReader:
    """Reads a dataset, one epoch after another; its position can be saved and loaded.

    Args:
        parts: parts of the dataset.
        runtime: the program that reads the dataset.

    Attributes:
        parts: parts of the dataset, whose order is that of the state that was loaded last.
        bookmark: the position.
    """

    def __init__(self, parts: DatasetParts, runtime: Runtime) -> None:
        epochs = runtime.epochs(parts.group, parts.samples.deal_options)
        self.parts = parts
        self.bookmark = Bookmark(runtime.counter(), epochs)
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"EpochReader({self.parts.manifest!r}, epoch={self.epoch})"

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker cannot see wrappers around its parent's loader, so the parent looks here.
        self.parts.group.refuse_resharding()
        return dict(self.__dict__)

    @property
    def epochs(self) -> DatasetEpochs:
        """The epochs, as this process reads them."""
        return DatasetEpochs(self.parts, self._runtime)

    def derived(self, name: str = "", **changes: Any) -> EpochReader:
        """Return a reader of a dataset with some other parts and a position of its own.

        The new reader begins at this reader's position.

        Args:
            name: name of the new dataset, the same on all ranks; "" for ranks to match it by the
                order in which such datasets are made.
            changes: the parts that are different, by their names in `DatasetParts`.
        """
        group = self.parts.group.of_copy(name)
        derived = EpochReader(replace(self.parts, group=group, **changes), self._runtime)
        derived.bookmark.follow(self.bookmark)
        return derived

    def follow(self, other: EpochReader) -> None:
        """Continue where another reader of the same samples does.

        Does nothing unless the other reader's epoch or state was set since the last call.
        """
        if self.bookmark.follow(other.bookmark):
            self._take_terms(other.parts.samples.terms)

    # Iterations

    def begin(self) -> Iterator[Any]:
        """Begin an iteration and return its samples."""
        iteration = self._runtime.iteration()
        self._start(iteration)
        samples = self._samples(iteration)
        iteration.attach(samples)
        return samples

    def _start(self, iteration: Iteration) -> None:
        """Give an iteration its epoch, the states from which it resumes, and its run."""
        self.bookmark.begin(iteration)
        self._take_terms(self.bookmark.terms)
        self.epochs.check()
        self._warn_if_uncounted(self.parts.group.topology())
        run = self.epochs.run(iteration.epoch, iteration.states)
        iteration.position = run
        # Where samples are not counted, it is unknown how many are left.
        may_be_at_end = not run.counted or not run.samples_left
        if iteration.states and may_be_at_end:
            # The next iteration must read the next epoch. StatefulDataLoader asks for no sample if
            # it resumes at the end, so that this iteration might never count as read otherwise.
            self.bookmark.make_main(iteration)

    def _samples(self, iteration: Iteration) -> Iterator[Any]:
        """Yield the samples of an iteration, which starts again if a state was loaded since."""
        # A wrapper around the iterator is on the call stack only from the first sample on.
        self.parts.group.refuse_resharding()
        in_worker = iteration.loader is not None  # a worker of a plain DataLoader
        if not in_worker and self.bookmark.is_outdated(iteration):
            # A state was loaded between the call of `iter` and the first sample.
            self._start(iteration)

        run: EpochRun = iteration.position
        samples: Iterator[Any] = run.items(partial(self.bookmark.finish, iteration))
        if not in_worker:
            samples = self._noting_takes(iteration, samples)
        try:
            yield from samples
        except GeneratorExit:
            self.bookmark.leave(iteration)
            raise
        iteration.reading = "over"

    def _noting_takes(self, iteration: Iteration, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield samples, and record in the bookmark that each is taken.

        From its second batch on, the iteration counts as reading the epoch, and not merely as a
        look at the data: it becomes the main one; see `Bookmark`.
        """
        # An item that a stage makes counts as a batch.
        first_batch_size = 1 if self.parts.stage else self.parts.batch_size
        bookmark = self.bookmark
        # This loop runs for each sample, so `take` is called only where it changes something.
        for number, sample in enumerate(samples):
            if number == first_batch_size:
                bookmark.make_main(iteration)
            if bookmark.latest is not iteration:
                bookmark.take(iteration)
            yield sample

    def _warn_if_uncounted(self, topology: Topology) -> None:
        """Warn once that samples are not counted, and how many workers have nothing to read."""
        epochs = self.epochs
        is_first_reader = topology.reader == 0  # the only reader of the job that warns
        if epochs.deal.counted or not is_first_reader:
            return
        with self.bookmark.counter.change() as count:
            if count.is_uncounted_logged:
                return
            count.is_uncounted_logged = True
        description = "shards are read one after another"
        if topology.readers > 1:
            description = "each worker gets whole shards"
            idle = max(0, topology.readers - len(self.parts.manifest))
            if idle:
                description += f" ({idle} of {topology.readers} workers get none)"
        log.warning("%s, and len() is unknown: %s", description, epochs.uncounted_reason())

    # Epochs and resuming.

    def _take_terms(self, terms: Terms) -> None:
        """Read from now on in the order of another run, which this run continues."""
        samples = self.parts.samples.on_terms(terms)
        if samples is not self.parts.samples:
            self.parts = replace(self.parts, samples=samples)

    @property
    def epoch(self) -> int:
        """The epoch that this process is reading, or else the next one that it would read."""
        current = self.bookmark.current
        if current is not None:
            # After its last sample, an iteration still goes on until the user has asked for more.
            has_last_sample = current.reading == "read" and current.live
            if current.reading == "open" or has_last_sample:
                return current.epoch
        return self.bookmark.next_epoch

    @property
    def position(self) -> int:
        """Number of samples of its share that this reader has passed, including bad ones."""
        current = self.bookmark.current
        return 0 if current is None else current.position.places_passed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads, also in running workers."""
        # A wrapper that sends one process's batches to all processes never reads in the others.
        self.parts.group.refuse_resharding()
        self.bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample taken.

        Raises ConfigError if a plain DataLoader's workers read the samples.
        """
        if not self._runtime.in_worker and self.bookmark.workers:
            raise ConfigError(
                "the samples are read by the loader's workers, which run ahead of the training "
                "loop",
                remedy="use dataset.loader(), or torchdata's StatefulDataLoader, and its "
                "state_dict()",
            )
        run = self._current_run()
        if self._runtime.is_asked_by_loader:
            # The loader itself records whether the epoch is over.
            return run.state().to_json()
        return run.state(over=run.is_over).to_json()

    def _current_run(self) -> EpochRun:
        """Return the run that this process is reading, or else the one that it would read next."""
        current = self.bookmark.current
        if current is not None:
            run: EpochRun = current.position
            return run
        return self.epochs.run(self.epoch, self.bookmark.next_states())

    def load_state_dict(self, state: object) -> None:
        """Resume from a state, or any structure that contains states, at the next iteration.

        Raises ConfigError if it contains no state, or a state of another dataset.
        """
        states: Sequence[SavedState] = find_states(state)
        before = self.parts
        # The states are compared with this dataset in the order of the run that saved them.
        self._take_terms(states[0].terms)
        try:
            states = self.epochs.states_to_read(states)
        except ConfigError:
            self.parts = before
            raise
        # If the mixture has changed since, these are other states, with the change in their terms.
        self._take_terms(states[0].terms)
        # A loader itself goes on to the next epoch if nothing is left of this one.
        if not self._runtime.is_asked_by_loader and self.epochs.is_read(states):
            states = [replace(each, over=True) for each in states]
        # Passed as JSON, so that they equal the states that running workers and later runs get.
        self.bookmark.load([each.to_json() for each in states], in_worker=self._runtime.in_worker)
