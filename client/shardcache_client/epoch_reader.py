"""A dataset's iterations over its epochs: what they check and read, and the states from which they resume."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeAlias

from shardcache.errors import ConfigError
from shardcache_client.arguments import T_co, checked, whole
from shardcache_client.batches.rank_batches import RankBatches
from shardcache_client.batches.rank_work import BatchForm, Reading
from shardcache_client.batches.sample_run import SampleRun, samples_of_worker
from shardcache_client.batches.stage_run import StageRun
from shardcache_client.batches.staged_epoch import StagedForm
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.handlers import Handler, reraise
from shardcache_client.order.deal import Assignment, Deal, SpanDeal, check
from shardcache_client.order.rounds import Partition, Topology
from shardcache_client.position import rank_state, staged_state
from shardcache_client.position.bookmark import Bookmark, Iteration
from shardcache_client.position.progress import Progress
from shardcache_client.position.rank_state import RankState, StateForm, progress_of
from shardcache_client.position.staged_state import Resume, StagedState
from shardcache_client.position.state import Saved, find_states
from shardcache_client.ranks.group import Epochs, RankGroup
from shardcache_client.reading.place_reader import SampleForm
from shardcache_client.settings import DatasetSettings
from shardcache_client.sharing.epoch_counter import EpochCounter

log = logging.getLogger("shardcache")

Run: TypeAlias = SampleRun | StageRun
"""What one reader is given in an epoch."""


def _same(batch_size: int) -> int:
    return batch_size


class EpochReader(Generic[T_co]):
    """An iterable over a dataset's samples, one epoch after another, whose position can be saved and loaded."""

    _group: RankGroup

    def _assemble(self, settings: DatasetSettings, dealing: Assignment, seed: int, on_error: Handler, job: str) -> None:
        """Set what an iteration needs, besides the ranks."""
        self.seed = seed  # as given, or as drawn
        self.manifest = settings.manifest
        self._on_error = on_error
        self._job = job
        self._dealing = dealing
        self._settings = settings
        self._bookmark = self._new_bookmark()
        self._uneven_deal: tuple[Deal, Deal] | None = None  # the dataset's, and the same without evenness

    def _new_bookmark(self) -> Bookmark:
        return Bookmark(self._new_counter(), self._new_epochs())

    def _new_epochs(self) -> Epochs:
        # With even=None, ranks may read different epochs.
        return Epochs() if self._dealing.even is None else self._group.epochs(self._dealing.batches())

    def __iter__(self) -> Iterator[T_co]:
        return self._begin(Iteration())

    # Differences of a PyTorch dataset

    def _new_counter(self) -> EpochCounter:
        return EpochCounter()

    def _loader_name(self) -> str:
        """Return a name for the loader that is unique on this node; empty if there is none."""
        return ""

    @property
    def _in_worker(self) -> bool:
        """True in a DataLoader worker."""
        return False

    @property
    def _loads_of_a_loader(self) -> bool:
        """True if a state is loaded by a loader that knows itself if an epoch is over."""
        return self._in_worker

    # Iterations

    def _begin(self, iteration: Iteration) -> Iterator[Any]:
        """Begin an iteration and return its samples."""
        self._start(iteration)
        samples = self._samples(iteration)
        iteration.read_by(samples)
        return samples

    def _start(self, iteration: Iteration) -> None:
        self._bookmark.begin(iteration)
        self._take_seeds(self._bookmark.seeds)
        iteration.place = stream = self._stream(iteration.epoch, iteration.states)
        if iteration.states and not (stream.counted and stream.samples_left):
            self._bookmark.count(iteration)  # StatefulDataLoader asks for no sample if it resumes at the end

    def _samples(self, iteration: Iteration) -> Iterator[Any]:
        self._group.refuse_resharding()  # a wrapper around the iterator is on the stack only from the first sample on
        in_worker = iteration.loader is not None
        if not in_worker and self._bookmark.is_outdated(iteration):
            self._start(iteration)  # a state was loaded before the first sample is read

        run: Run = iteration.place
        samples: Iterator[Any] = run.samples(partial(self._bookmark.finish, iteration))
        if not in_worker:
            samples = self._noted(iteration, samples)
        try:
            yield from samples
        except GeneratorExit:
            self._bookmark.leave(iteration)
            raise
        iteration.ended = True

    def _noted(self, iteration: Iteration, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield samples, noting of each that it is taken, and when the first of the second batch is asked for."""
        first_batch = 1 if self._settings.stage else self.batch_size
        for number, sample in enumerate(samples):
            if number == first_batch:
                self._bookmark.count(iteration)
            self._bookmark.take(iteration)
            yield sample

    def _stream(self, epoch: int, states: Sequence[Saved]) -> Run:
        """Return this process's share of an epoch, from states if there are any."""
        self._check()
        topology = self.topology()
        self._explain(topology)
        return self._run_of(epoch, topology, states)

    def _run_of(self, epoch: int, topology: Topology, states: Sequence[Saved]) -> Run:
        states = states if states and states[0].epoch == epoch else ()
        if self._is_numbered(states):
            return self._sample_run(epoch, topology, states)
        form = self._staged_form(states)
        return StageRun(
            self._reading(topology, form.deal),
            form,
            self._resume(epoch, topology, states, form.deal),
            topology,
            self._quota(topology, form.deal),
            is_over=_are_over(states) or staged_state.has_ended(states, topology),
        )

    def _identity(self, topology: Topology) -> ReaderIdentity:
        return ReaderIdentity(self._job, topology, self._loader_name(), self.batch_size)

    # Samples that have numbers: counted ones that no filter leaves out

    def _is_numbered(self, states: Sequence[Saved] = ()) -> bool:
        """Return True if a batch can be found by its number; `states` are those to resume from."""
        settings = self._settings
        if settings.stage is not None or settings.pipeline.filters or not self._deal().counted:
            return False
        return not states or states[0].counted

    def _sample_run(self, epoch: int, topology: Topology, states: Sequence[Saved]) -> SampleRun:
        rank = Topology(topology.rank, topology.world_size)
        first = states[0] if len(states) == 1 else None  # a loader that restores its workers gives each its own state
        if isinstance(first, RankState) and topology.workers > 1 and self._is_of(first, topology):
            progress = first.progress
            part = first.part
        else:
            progress = self._progress(epoch, rank, states)
            part = None
        # Of the class, not bound to this object: that would be a cycle, and keep the session of a reader that is gone.
        asked_size = type(self)._asked_size
        return SampleRun(
            self._reading(topology, self._deal()),
            progress,
            topology,
            self._state_form(self.batch_size, drop_last=None),
            self.batch_size,
            asked_size,
            part,
            is_read=_are_over(states),
        )

    def _is_of(self, state: RankState, topology: Topology) -> bool:
        """Return True if a state is that of a worker with this place, perhaps of another rank that is in step."""
        if state.part is None or state.rank is None or state.rank[1] != topology.world_size:
            return False
        if state.rank[0] != topology.rank and self._dealing.even is None:
            return False
        return (state.part.worker, state.part.workers) == (topology.worker, topology.workers)

    # Returns the size of the batches that a loader makes of the samples, given that of the dataset; see `SampleRun`.
    _asked_size: Callable[[int], int] = staticmethod(_same)

    def _progress(self, epoch: int, rank: Topology, states: Sequence[Saved]) -> Progress:
        """Return the progress from which a rank resumes an epoch."""
        if not states:
            return Progress(epoch)
        staged = [each for each in states if isinstance(each, StagedState)]
        if staged:
            return staged_state.as_progress(staged)
        return progress_of([each for each in states if isinstance(each, RankState)], rank)

    def _reading(self, topology: Topology, deal: Deal) -> Reading:
        settings = self._settings
        pipeline = settings.pipeline
        form = SampleForm(settings.manifest, pipeline.view, settings.handover, *pipeline.named_sources)
        identity = self._identity(topology)
        return Reading(deal, form, pipeline, settings.sessions, identity, self._on_error, settings.epochs)

    def _state_form(self, batch_size: int, *, drop_last: bool | None) -> StateForm:
        deal = self._deal()
        assert isinstance(deal, SpanDeal)
        return StateForm(self._settings.datasets[True], deal, batch_size, drop_last, self._settings.seeds)

    def _rank_batches(self, epoch: int, states: Sequence[Saved], form: BatchForm) -> RankBatches:
        """Return the batches of this rank in an epoch, from states of that epoch if there are any."""
        rank = self._group.ranks
        progress = self._progress(epoch, rank, states)
        return RankBatches(self._reading(rank, self._deal()), progress, rank, form, is_read=_are_over(states))

    # Any others: those of which a filter leaves some out, uncounted ones, and those that a stage regroups

    def _staged_form(self, states: Sequence[Saved] = ()) -> StagedForm:
        """Return the facts of epochs without numbers; `states` are those to resume from."""
        settings = self._settings
        deal = self._deal()
        if states and states[0].counted != deal.counted:
            deal = self._dealing.deal(self.manifest, counted=states[0].counted)
        dataset = settings.datasets[deal.counted]
        leaves_out = settings.pipeline.leaves_out or self._on_error is not reraise
        return StagedForm(dataset, self._uneven(deal), settings.stage, self.seed, settings.seeds, leaves_out)

    def _uneven(self, deal: Deal) -> Deal:
        """Return a deal by which each sample comes once. A stage makes ranks equal; after a filter they may differ."""
        if self._uneven_deal is None or self._uneven_deal[0] is not deal:
            dealing = replace(self._dealing, even=None, global_batch_size=None)
            self._uneven_deal = deal, dealing.deal(self.manifest, counted=deal.counted)
        return self._uneven_deal[1]

    def _resume(self, epoch: int, reader: Topology, states: Sequence[Saved], deal: Deal) -> Resume:
        """Return from where a rank, or its worker in a plain DataLoader, resumes an epoch."""
        if not states:
            return Resume(Progress(epoch))
        stage = self._settings.stage
        return staged_state.resume(states, reader, counted=deal.counted, stage=stage.name if stage else "")

    def _quota(self, reader: Topology, deal: Deal) -> int | None:
        """Return the number of samples that a reader is to be given; None for all that come."""
        samples = self._dealing.samples_per_epoch
        if deal.counted or samples is None:
            return None
        of_rank = Partition(reader.world_size, 1, self._dealing.even).rank_size(samples, reader.rank)
        return samples_of_worker(of_rank, self.batch_size, reader.worker, reader.workers)

    # Checks

    def _check(self) -> None:
        """Raise an error if this process may not read."""
        self._group.refuse_resharding()
        topology = self.topology()
        deal = self._deal()
        check(deal, topology, self._dealing.even)
        self._check_filters(topology)
        self._group.compare(self.manifest, counted=deal.counted)
        self._group.compare_options(self._dealing.options())

    def _check_filters(self, topology: Topology) -> None:
        if self._settings.pipeline.filters and self.has_global_batches:
            raise ConfigError(
                "with a filter, global batches would depend on the number of workers",
                remedy="omit global_batch_size; or filter when shards are written",
            )
        is_made_equal = self._settings.stage is not None
        needs_equal = topology.world_size > 1 and self._dealing.even is not None
        if self._settings.pipeline.filters and needs_equal and not is_made_equal:
            raise ConfigError(
                f"a filter gives {topology.world_size} ranks different numbers of samples, and ranks that train "
                "together would wait for each other",
                remedy="pass even=None if ranks may differ, as for inference; else filter when shards are written",
            )

    def _deal(self) -> Deal:
        """Return the deal of this dataset; by sample counts only if all ranks are sure to have the same counts."""
        deal = self._settings.deal
        needed = self._dealing.needs_counts or self.manifest.choices is not None
        if not deal.counted or needed or self._group.alone:
            return deal
        shared = self._group.settled or self.manifest.counts_listed
        return deal if shared else self._dealing.deal(self.manifest, counted=False)

    def _why_not_counted(self) -> str:
        uncounted, shards = self.manifest.uncounted, len(self.manifest)
        known = "this node has counted the samples, but other ranks' nodes may not have"
        return (
            f"{f'{uncounted} of {shards} shards were never counted' if uncounted else known}. "
            "Use the dataset's index.json as the url; `shardcache index URL... -o index.json` makes it, once"
        )

    def _explain(self, topology: Topology) -> None:
        """Log once that samples are not counted, and how many workers have nothing to read because of it."""
        if self._deal().counted or topology.reader:
            return
        with self._bookmark.counter.change() as count:
            if count.is_explained:
                return
            count.is_explained = True
        dealt = "shards are read one after another"
        if topology.readers > 1:
            idle = max(0, topology.readers - len(self.manifest))
            dealt = "each worker gets whole shards"
            if idle:
                dealt += f" ({idle} of {topology.readers} workers get none)"
        log.warning("%s, and len() is unknown: %s", dealt, self._why_not_counted())

    # Epochs and resuming

    def _take_seeds(self, seeds: Mapping[str, int]) -> None:
        """Read in the order of seeds that another run has drawn, if this one has drawn its own."""
        if self._settings.seeds and seeds and self._settings.seeds != seeds:
            self.seed = seeds.get("", self.seed)
            self._dealing = self._dealing.reseeded(seeds)
            deal, datasets = self._dealing.deal(self.manifest), self._dealing.identities(self.manifest)
            self._settings = replace(self._settings, seeds=seeds, deal=deal, datasets=datasets)

    @property
    def epoch(self) -> int:
        """The epoch that this process is reading, or else the next one that it would read."""
        current = self._bookmark.current
        if current is None or current.ended or (current.done and not current.live):
            return self._bookmark.next_epoch
        return current.epoch

    @property
    def position(self) -> int:
        """Number of samples of its share that this reader has passed, bad ones included."""
        current = self._bookmark.current
        return 0 if current is None else current.place.taken

    @checked(epoch=whole(0))
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads, including those in running DataLoader workers."""
        self._group.refuse_resharding()  # a wrapper that sends one process's batches to all never reads on the others
        self._bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample taken: a few numbers, whatever the size of the dataset.

        A state taken after an epoch's last sample resumes with the next epoch, unless other ranks have one sample more
        or fewer (`even=None`): then load their states along with it.
        """
        stream = self._current_stream()
        return stream.state(over=stream.is_over).to_json()

    def _current_stream(self) -> Run:
        """Return the stream at whose position this process is, or else the one that it would read."""
        current = self._bookmark.current
        if current is not None:
            run: Run = current.place
            return run
        return self._run_of(self.epoch, self.topology(), self._bookmark.next_states())

    def load_state_dict(self, state: object) -> None:
        """Resume from a state, exactly where it was taken, at the next iteration of its epoch.

        This is the next iteration, unless `set_epoch` sets another epoch. After a state taken at the end of an epoch,
        the next epoch is read; if `set_epoch` names the finished epoch, the iteration yields nothing.

        The number of ranks and workers may differ from the run that saved the state: the rest of the epoch is divided
        among the new ones. One rank's state suffices, since ranks take their batches in step. With `even=None`, ranks
        differ by a sample: one rank's state then suffices until it reaches the end of its share; after that, an error
        asks for the states of the others. From a list of these, each rank's own is used.

        Args:
            state: the return value of `state_dict`, or any structure that contains such states, such as a
                StatefulDataLoader's.

        Raises ConfigError if it contains no state, or one of another dataset; the next iteration raises it if the
        positions of all readers cannot be derived.
        """
        saved, before = find_states(state)[0], (self.seed, self._dealing, self._settings)
        self._take_seeds(saved.seeds)
        try:
            self._check_saved(saved)
        except ConfigError:
            self.seed, self._dealing, self._settings = before
            raise
        if not self._loads_of_a_loader and self._is_read(states := find_states(state)):
            state = [replace(each, over=True).to_json() for each in states]
        self._bookmark.load(state, worker=self._in_worker)

    def _check_saved(self, saved: Saved) -> None:
        """Raise ConfigError if a state is not of this dataset."""
        if saved.dataset != self._settings.datasets.get(saved.counted):
            raise ConfigError(
                "the state is from another dataset, or the numbers of samples in its shards have changed",
                remedy="create the dataset with the urls, seed, shuffle and samples_per_epoch of the run that saved it",
            )

    def _is_read(self, states: Sequence[Saved]) -> bool:
        """Return True if states of this dataset show that nothing is left of their epoch."""
        first, deal = states[0], self._settings.deal
        if isinstance(first, RankState):
            assert isinstance(deal, SpanDeal)
            found = [each for each in states if isinstance(each, RankState)]
            return _are_over(states) or rank_state.is_read(found, deal, self._group.ranks)
        return _are_over(states) or staged_state.have_ended([each for each in states if isinstance(each, StagedState)])

    # Ranks and workers

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return self._group.topology()

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of this rank; with `global_batch_size`, its part of a global batch.

        Raises ConfigError if the number of ranks does not divide `global_batch_size`.
        """
        return self._dealing.batch_size_of(self._group.ranks.world_size)

    @property
    def has_global_batches(self) -> bool:
        """True if global batches do not depend on the number of ranks and workers."""
        return self._dealing.global_batch_size is not None

    def follow(self, other: "EpochReader[Any]") -> None:
        """Continue where another reader of the same samples does, if its epoch or state was set since."""
        if self._bookmark.follow(other._bookmark):
            self._take_seeds(other._settings.seeds)


def _are_over(states: Sequence[Saved]) -> bool:
    return bool(states) and all(state.over for state in states)
