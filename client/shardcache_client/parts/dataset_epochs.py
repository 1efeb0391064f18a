"""The epochs of a dataset as this process reads them, made of the dataset's parts and of states.

A run is one process's reading of one epoch. There are two kinds. Where every sample of an epoch has
a number, a rank's batches are found by their numbers (`SampleRun`). Samples have no numbers if a
filter leaves some out, if nobody has counted those of each shard, or if a stage regroups them, for
example into blocks of tokens. Then a reader goes through its share one sample after another
(`StageRun`).

A reader is a rank, or one of its workers in a plain DataLoader. A deal divides the samples or the
shards of an epoch among the readers. Samples are counted if the number of samples of every shard is
known. A stage regroups samples, such as by packing several into one. A state is a saved position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

from shardcache.shared.exceptions import ConfigError
from shardcache_client.batches.rank_batches import RankBatches
from shardcache_client.batches.rank_work import BatchForm, Reading
from shardcache_client.batches.sample_run import RunStart, SampleRun, samples_of_worker
from shardcache_client.batches.stage_run import StageRun
from shardcache_client.batches.staged_epoch import StagedForm
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.handlers import reraise
from shardcache_client.order.dealing.deal import Deal, SpanDeal
from shardcache_client.order.dealing.deal_options import check_even
from shardcache_client.order.mixture import MixtureOptions
from shardcache_client.order.sequences.partition import Partition
from shardcache_client.order.topology import Topology
from shardcache_client.parts.dataset_parts import DatasetParts
from shardcache_client.parts.runtime import Runtime
from shardcache_client.position import rank_state, staged_state
from shardcache_client.position.mixture_change import MixtureLoad
from shardcache_client.position.progress import Progress
from shardcache_client.position.rank_state import RankState, StateForm, progress_of
from shardcache_client.position.staged_state import Resume, StagedState
from shardcache_client.position.state import SavedState
from shardcache_client.reading.epochs.epoch_plans import SampleForm

log = logging.getLogger("shardcache")

EpochRun: TypeAlias = SampleRun | StageRun
"""The items of one reader in an epoch."""


class DatasetEpochs:
    """The epochs of one dataset.

    Args:
        parts: parts of the dataset.
        runtime: the program that reads the dataset.
    """

    def __init__(self, parts: DatasetParts, runtime: Runtime) -> None:
        self._parts = parts
        self._runtime = runtime

    def __repr__(self) -> str:
        return f"DatasetEpochs({self._parts.manifest!r})"

    @property
    def deal(self) -> Deal:
        """The deal of samples, or of whole shards if ranks may not have the same sample counts."""
        samples = self._parts.samples
        group = self._parts.group

        # 1. This rank's own deal serves if other ranks cannot have another deal by other counts:
        #    whole shards are dealt, every rank must have all counts, or there is no other rank.
        #    `for_ranks` is called only here: it matters only to mixtures, which need all counts.
        is_selection = samples.manifest.choices is not None
        needs_counts = samples.deal_options.needs_counts or is_selection
        if not samples.deal.counted or needs_counts or group.is_alone:
            return samples.deal.for_ranks(group.ranks.world_size)

        # 2. All ranks have rank 0's counts, or the counts of an index file.
        if group.has_manifest_of_rank_0 or samples.manifest.counts_listed:
            return samples.deal

        # 3. Another rank's node may have counted fewer shards, so whole shards are dealt.
        return samples.deal_of(counted=False)

    def uncounted_reason(self) -> str:
        """Return the reason why samples are not counted, and what to do about it."""
        manifest = self._parts.manifest
        if manifest.uncounted:
            reason = f"{manifest.uncounted} of {len(manifest)} shards were never counted"
        else:
            reason = "this node has counted the samples, but other ranks' nodes may not have"
        remedy = self._runtime.counting_remedy(manifest)
        return (
            f"{reason}. Use the dataset's index.json as the url; "
            f"`shardcache index URL... -o index.json` makes it, once{remedy}"
        )

    def rank_samples(self) -> int:
        """Return the number of samples that this rank reads per epoch.

        Raises TypeError while it is unknown.
        """
        # First, as this raises ConfigError if ranks cannot have equal parts of a global batch.
        samples = self.deal.rank_size(self._parts.group.topology())
        if self._parts.stage is not None:
            raise TypeError(
                "len() is unknown until the samples have been read, because a stage regroups them"
            )
        if self._parts.pipeline.has_filters:
            raise TypeError("len() is unknown because of filter()")
        if samples is None:
            raise TypeError(f"the number of samples is unknown: {self.uncounted_reason()}")
        return samples

    # Checks

    def check(self) -> None:
        """Check that this process may read, and prepare it for that. Raises an error if not."""
        samples = self._parts.samples
        group = self._parts.group
        group.refuse_resharding()
        topology = group.topology()
        deal = self.deal
        check_even(deal, topology)
        self._check_filters(topology)
        group.compare_manifest(samples.manifest, counted=deal.counted)
        group.compare_options(samples.deal_options.common_options())
        self._runtime.prepare(self._parts.handover)

    def _check_filters(self, topology: Topology) -> None:
        """Raise ConfigError if a filter or stage cannot be combined with the other options."""
        parts = self._parts
        changes_batches = bool(parts.pipeline.has_filters or parts.stage)
        if parts.samples.deal_options.has_source_batches and changes_batches:
            raise ConfigError(
                "batches of one source have fixed samples, and this mixture is filtered, or "
                "yields groups of them",
                remedy='omit batches="source"; pack(per_source=True) makes blocks of one source',
            )
        if not parts.pipeline.has_filters:
            return
        if parts.has_global_batches:
            raise ConfigError(
                "with a filter, global batches would depend on the number of workers",
                remedy="omit global_batch_size; or filter when shards are written",
            )
        # A stage gives all ranks equally many items, whatever the filter leaves of their samples.
        has_equal_items = parts.stage is not None
        needs_equal = topology.world_size > 1 and parts.samples.deal_options.even is not None
        if needs_equal and not has_equal_items:
            raise ConfigError(
                f"a filter gives {topology.world_size} ranks different numbers of samples, and "
                "ranks that train together would wait for each other",
                remedy="pass even=None if ranks may differ, as for inference; else filter when "
                "shards are written",
            )

    def states_to_read(self, states: Sequence[SavedState]) -> Sequence[SavedState]:
        """Return the states from which to read on, given the states that were loaded.

        They are the loaded states themselves, unless a mixture has changed since. Raises
        ConfigError if the loaded states are not of this dataset.
        """
        samples = self._parts.samples
        saved = states[0]
        if isinstance(samples.deal_options, MixtureOptions):
            return self._states_of_mixture(states, samples.deal_options)
        # A dataset has one identifier if its samples are counted, and another if they are not.
        if saved.dataset != samples.identifiers.get(saved.counted):
            raise ConfigError(
                "the state is from another dataset, or the numbers of samples in its shards have "
                "changed",
                remedy="create the dataset with the urls, seed, shuffle and samples_per_epoch of "
                "the run that saved it",
            )
        return states

    def _states_of_mixture(
        self, states: Sequence[SavedState], deal_options: MixtureOptions
    ) -> Sequence[SavedState]:
        """Return the states from which a mixture reads on; see `states_to_read`."""
        ranks = self._parts.group.ranks
        load = MixtureLoad(states, deal_options, self._parts.manifest, ranks.world_size)
        if load.is_same:
            return states
        if self._runtime.in_worker:
            raise ConfigError(
                "the mixture has changed, and a loader's worker does not know what the others "
                "have read",
                remedy="load the state into the mixture itself, before the loader is made: "
                "mixture.load_state_dict(state)",
            )
        # A loader itself goes on to the next epoch if nothing is left of this one.
        changed = load.states_after_change(keeps_epoch=self._runtime.is_asked_by_loader)
        if not ranks.rank:
            log.warning(
                "epoch %d: the mixture has changed since the state was taken; its sources "
                "continue where they were, with the new weights",
                changed[0].epoch,
            )
        return changed

    # One process's run of an epoch.

    def run(self, epoch: int, states: Sequence[SavedState]) -> EpochRun:
        """Return this process's run of an epoch.

        Args:
            epoch: number of the epoch.
            states: states from which the run resumes; ignored if they are of another epoch.
        """
        topology = self._parts.group.topology()
        if states and states[0].epoch != epoch:
            states = ()
        if self.is_numbered(states):
            return self._sample_run(epoch, topology, states)
        form = self.staged_form(states)
        # Nothing may be left for any reader, or for this one alone.
        was_read = are_over(states) or staged_state.has_reader_ended(states, topology)
        return StageRun(
            self.reading(topology, form.deal),
            form,
            resume=self.resume(epoch, topology, states, form.deal),
            reader=topology,
            quota=self.quota(topology, form.deal),
            was_read=was_read,
        )

    def reading(self, topology: Topology, deal: Deal) -> Reading:
        """Return the means of reading the samples that a deal gives to a reader."""
        parts = self._parts
        pipeline = parts.pipeline
        manifest = parts.manifest
        sources, first_shards = pipeline.named_sources
        form = SampleForm(
            manifest,
            view_of=pipeline.view,
            handover=parts.handover,
            sources=sources,
            first_shards=first_shards,
            scattered=parts.scattered,
        )
        loader = self._runtime.loader_name()
        identity = ReaderIdentity(parts.job, topology, loader, parts.batch_size)
        return Reading(
            deal,
            form,
            pipeline,
            sessions=ReaderSessions(parts.sessions, identity),
            on_error=parts.on_error,
            epochs=parts.epochs,
        )

    # Samples that have numbers: they are counted, and no filter leaves some out.

    def is_numbered(self, states: Sequence[SavedState] = ()) -> bool:
        """Return True if a batch can be found by its number.

        Args:
            states: states from which the epoch is resumed.
        """
        parts = self._parts
        if parts.stage is not None or parts.pipeline.has_filters or not self.deal.counted:
            return False
        return not states or states[0].counted

    def _sample_run(
        self, epoch: int, topology: Topology, states: Sequence[SavedState]
    ) -> SampleRun:
        """Return the run of a reader whose samples have numbers; see `run`."""
        return SampleRun(
            self.reading(topology, self.deal),
            reader=topology,
            # None: it is unknown whether a plain DataLoader leaves out the last batch.
            form=self.state_form(self._parts.batch_size, drop_last=None),
            asked_size=self._runtime.asked_size,
            start=self._run_start(epoch, topology, states),
        )

    def _run_start(self, epoch: int, topology: Topology, states: Sequence[SavedState]) -> RunStart:
        """Return the place from which a reader resumes an epoch whose samples have numbers.

        For the arguments, see `resume`.
        """
        is_read = are_over(states)
        # A loader that restores its workers gives each worker a single state: the worker's own,
        # which has the samples that this worker has given (`part`).
        own = states[0] if len(states) == 1 else None
        if isinstance(own, RankState) and self._is_of_worker(own, topology):
            return RunStart(own.progress, own.part, is_read=is_read)
        whole_rank = Topology(topology.rank, topology.world_size)
        return RunStart(_progress(epoch, whole_rank, states), is_read=is_read)

    def _is_of_worker(self, state: RankState, topology: Topology) -> bool:
        """Return True if a state is of the same worker: equal number, equal number of workers.

        If all ranks read equally many samples, the state may be of the same worker of another rank.
        """
        if topology.workers == 1 or state.part is None or state.rank is None:
            return False
        rank, world_size = state.rank
        if world_size != topology.world_size:
            return False
        deal_options = self._parts.samples.deal_options
        are_ranks_equal = deal_options.even is not None
        if rank != topology.rank and not are_ranks_equal:
            return False
        return (state.part.worker, state.part.workers) == (topology.worker, topology.workers)

    def state_form(self, batch_size: int, *, drop_last: bool | None) -> StateForm:
        """Return the facts that states of numbered batches share; see `StateForm`."""
        samples = self._parts.samples
        deal = self.deal
        assert isinstance(deal, SpanDeal)  # batches have numbers only where samples are dealt
        identifier = samples.identifiers[deal.counted]
        return StateForm(
            identifier, deal, batch_size, drop_last=drop_last, seeds=samples.drawn_seeds
        )

    def rank_batches(
        self, epoch: int, states: Sequence[SavedState], form: BatchForm
    ) -> RankBatches:
        """Return the batches of this rank in an epoch.

        Args:
            epoch: number of the epoch.
            states: states from which the epoch is resumed; empty to read it from its beginning.
            form: form of the batches.
        """
        rank = self._parts.group.ranks
        progress = _progress(epoch, rank, states)
        reading = self.reading(rank, self.deal)
        return RankBatches(reading, progress, rank, form, is_read=are_over(states))

    # Samples without numbers: a filter leaves some out, they are not counted, or a stage regroups
    # them.

    def staged_form(self, states: Sequence[SavedState] = ()) -> StagedForm:
        """Return the facts that epochs of samples without numbers share.

        Args:
            states: states from which the epoch is resumed.
        """
        parts = self._parts
        samples = parts.samples
        deal = samples.deal_of(counted=states[0].counted) if states else self.deal
        # The deal gives each sample once, without padding, since the filter, the stage or the quota
        # decides how many items a rank gets. The quota is a rank's part of `samples_per_epoch`.
        uneven_deal = samples.uneven_deal(deal)
        return StagedForm(
            dataset=samples.identifiers[deal.counted],
            deal=uneven_deal,
            stage=parts.stage,
            seed=samples.seed,
            seeds=samples.drawn_seeds,
            leaves_out=parts.pipeline.leaves_out or parts.on_error is not reraise,
        )

    def resume(
        self, epoch: int, reader: Topology, states: Sequence[SavedState], deal: Deal
    ) -> Resume:
        """Return the place from which a rank, or a plain DataLoader's worker, resumes an epoch.

        Args:
            epoch: number of the epoch.
            reader: the rank or the worker.
            states: states from which the epoch is resumed; empty to read it from its beginning.
            deal: division of the epoch.
        """
        if not states:
            return Resume(Progress(epoch))
        stage = self._parts.stage
        stage_name = stage.name if stage else ""
        return staged_state.resume_place(states, reader, counted=deal.counted, stage=stage_name)

    def quota(self, reader: Topology, deal: Deal) -> int | None:
        """Return the number of samples that a reader gets; None for all samples of its share."""
        deal_options = self._parts.samples.deal_options
        # A deal of counted samples has no more samples than `samples_per_epoch`. With uncounted
        # shards, the readers have to stop at this number.
        if deal.counted or deal_options.samples_per_epoch is None:
            return None
        partition = Partition(reader.world_size, deal_options.even)
        of_rank = partition.size(deal_options.samples_per_epoch, reader.rank)
        return samples_of_worker(of_rank, self._parts.batch_size, reader.worker, reader.workers)

    # States

    def is_read(self, states: Sequence[SavedState]) -> bool:
        """Return True if states of this dataset show that nothing is left of their epoch.

        This includes states that were taken after the last batch, before the user saw the end.
        """
        if are_over(states):
            return True
        if isinstance(states[0], RankState):
            deal = self.deal
            assert isinstance(deal, SpanDeal)  # as these states are of dealt samples
            of_ranks = [each for each in states if isinstance(each, RankState)]
            return rank_state.is_read(of_ranks, deal, self._parts.group.ranks)
        return staged_state.have_ended([each for each in states if isinstance(each, StagedState)])


def are_over(states: Sequence[SavedState]) -> bool:
    """Return True if there are states, and all were taken at the end of their epoch."""
    return bool(states) and all(state.over for state in states)


def _progress(epoch: int, rank: Topology, states: Sequence[SavedState]) -> Progress:
    """Return the progress from which a rank resumes an epoch.

    Args:
        epoch: number of the epoch.
        rank: the rank.
        states: states of the epoch; empty to read it from its beginning.
    """
    if not states:
        return Progress(epoch)
    staged = [each for each in states if isinstance(each, StagedState)]
    if staged:
        return staged_state.as_progress(staged)
    return progress_of([each for each in states if isinstance(each, RankState)], rank)
