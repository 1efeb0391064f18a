"""The loading of states into a mixture that may have changed since they were saved. Pure.

A mixture reads from several datasets, its sources, in proportion to their weights. The user may
change the sources, the weights, the form of the batches or the length of an epoch. Each source then
goes on after the samples that were taken from it. This module makes the `Change` that records how
many these were, and that becomes part of all later states.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.dealing.deal import SampleDeal, SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.mixture import MixtureOptions
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.changes import Change, MixtureState
from shardcache_client.order.sources.courses import GlobalBatches
from shardcache_client.order.topology import Topology
from shardcache_client.position import rank_state, staged_state
from shardcache_client.position.progress import Progress
from shardcache_client.position.rank_state import RankState, progress_of_all
from shardcache_client.position.staged_state import StagedState
from shardcache_client.position.state import SavedState


class MixtureLoad:
    """The loading of states into a mixture, whose sources or weights may have changed since.

    Args:
        states: the states, all saved at the same moment of a job.
        deal_options: the options of the mixture as it is now.
        manifest: the shards of all its sources.
        ranks: number of ranks that resume.

    Attributes:
        is_same: True if the mixture reads the states' epoch as the interrupted run would.

    Raises ConfigError if the states are from other sources.
    """

    def __init__(
        self,
        states: Sequence[SavedState],
        deal_options: MixtureOptions,
        manifest: Manifest,
        ranks: int,
    ) -> None:
        first = states[0]  # the mixture and the epoch are the same in all of them
        if first.mixture is None:
            raise _other_dataset_error()
        self._states = states
        self._deal_options = deal_options.after(first.mixture.change)
        self._manifest = manifest
        self._ranks = ranks
        # `identities` has an identifier for counted samples (True), and one for uncounted samples.
        # Those of a mixture are always counted.
        self._dataset = deal_options.identities(manifest)[True]

        current = self._mixture(self._deal_options, first.epoch)
        has_same_sources = first.dataset == self._dataset
        self._saved_mixture = first.mixture
        if has_same_sources:
            self._saved_mixture = _with_identities(first.mixture, current)
        self.is_same = has_same_sources and _is_same(self._saved_mixture, current)
        _check_sources(self._saved_mixture, current)

    def __repr__(self) -> str:
        return f"MixtureLoad({self._saved_mixture!r}, is_same={self.is_same})"

    def states_after_change(self, *, keeps_epoch: bool = False) -> Sequence[SavedState]:
        """Return the states from which the mixture resumes if it has changed.

        Args:
            keeps_epoch: True to stay in the states' epoch even if nothing is left of it. The caller
                then goes on to the next epoch itself.

        Raises ConfigError if the positions of all readers cannot be derived.
        """
        deal_options = self._deal_options
        change = change_of(
            self._states,
            self._saved_mixture,
            deal_options.even,
            deal_options.global_batches,
            keeps_epoch=keeps_epoch,
        )
        mixture = self._mixture(deal_options.after(change), change.epoch)
        seeds = self._states[0].seeds
        at_start_of_epoch = Progress(change.epoch)
        return [RankState(self._dataset, at_start_of_epoch, mixture=mixture, seeds=seeds)]

    def _mixture(self, deal_options: MixtureOptions, epoch: int) -> MixtureState:
        """Return the mixture as a state of this run would describe it in an epoch."""
        deal = deal_options.deal(self._manifest)
        # Mixtures never deal whole shards.
        assert isinstance(deal, SpanDeal)
        mixture = deal.for_ranks(self._ranks).mixture_of(epoch)
        assert mixture is not None
        return mixture


def _other_dataset_error() -> ConfigError:
    """Return the error for states whose sources are not those of the mixture."""
    return ConfigError(
        "the state is from another dataset, or the numbers of samples in its shards have changed",
        remedy="create the mixture with sources of the run that saved it, with their urls, seed "
        "and shuffle",
    )


def _with_identities(saved_mixture: MixtureState, current: MixtureState) -> MixtureState:
    """Return a state's mixture with the identities of its sources, in the order of `current`.

    States of earlier releases lack identities and order.

    Args:
        saved_mixture: the mixture in the state.
        current: the same mixture in this run.
    """
    saved_sources = saved_mixture.epoch_sources
    if saved_sources.keys() != current.epoch_sources.keys():
        raise _other_dataset_error()
    sources = []
    samples = []
    for source in current.sources:
        saved_source = saved_sources[source.name]
        sources.append(source._replace(start=saved_source.start))
        samples.append(saved_source.samples)
    return replace(saved_mixture, sources=tuple(sources), samples=tuple(samples))


def _is_same(saved_mixture: MixtureState, current: MixtureState) -> bool:
    """Return True if a state's epoch has the same samples of each source, in the same turns."""
    return (
        saved_mixture.epoch_sources == current.epoch_sources
        and saved_mixture.total == current.total
        and saved_mixture.form == current.form
    )


def _check_sources(saved_mixture: MixtureState, current: MixtureState) -> None:
    """Raise ConfigError if all sources are new, or one differs from its namesake in a state."""
    saved_identities = {source.name: source.identity for source in saved_mixture.sources}
    if saved_mixture.change is not None:
        # Sources that were in the mixture earlier are known by its last change.
        for source in saved_mixture.change.sources:
            saved_identities.setdefault(source.name, source.identity)
    are_all_new = not any(source.name in saved_identities for source in current.sources)
    # A state of an earlier release has empty identities, which cannot be compared.
    lacks_identities = "" in saved_identities.values()
    if are_all_new or lacks_identities:
        raise _other_dataset_error()
    for source in current.sources:
        # A new source has no identity in the state.
        if saved_identities.get(source.name, source.identity) != source.identity:
            raise ConfigError(
                f"source {source.name!r} is not the one of this name in the state: it has other "
                "shards or samples, or another seed, shuffle, shuffle_window, canonical_nodes or "
                "global_batch_size",
                remedy="give it the arguments of the run that saved the state; or another name, as "
                "a new source",
            )


def change_of(
    states: Sequence[SavedState],
    saved_mixture: MixtureState,
    even: Even,
    global_batches: GlobalBatches | None,
    *,
    keeps_epoch: bool = False,
) -> Change:
    """Return the change from the mixture of some states to the mixture that resumes from them.

    Args:
        states: the states, all saved at the same moment of a job.
        saved_mixture: the mixture as it is in the states.
        even: policy for a number of samples that is not a multiple of the number of ranks.
        global_batches: the form of global batches; None if there are none.
        keeps_epoch: see `MixtureLoad.states_after_change`.

    Raises ConfigError if the positions of all readers cannot be derived.
    """
    epoch = states[0].epoch
    if saved_mixture.change is not None and epoch < saved_mixture.change.epoch:
        # The user has read an epoch before the change again, with `set_epoch`. It is read as if the
        # mixture had not been changed.
        saved_mixture = replace(saved_mixture, change=None)
    if not keeps_epoch and _are_read(states, saved_mixture, even, global_batches):
        return saved_mixture.change_at_end(epoch)
    phases = _progress(states).past(even)
    return saved_mixture.change_within(epoch, phases, global_batches)


def _progress(states: Sequence[SavedState]) -> Progress:
    """Return the progress of all readers. Raises ConfigError if it cannot be derived."""
    staged = [state for state in states if isinstance(state, StagedState)]
    if not staged:
        return progress_of_all([state for state in states if isinstance(state, RankState)])
    if not staged_state.cover_all_readers(staged):
        raise ConfigError(
            "the mixture has changed, and one rank's state does not say what the "
            "others have read of a group of samples",
            remedy="load the states of all ranks",
        )
    return staged_state.as_progress(staged)


def _are_read(
    states: Sequence[SavedState],
    saved_mixture: MixtureState,
    even: Even,
    global_batches: GlobalBatches | None,
) -> bool:
    """Return True if states show that nothing is left of their epoch on any rank."""
    if all(state.over for state in states):
        return True
    ranks = [state for state in states if isinstance(state, RankState)]
    if not ranks:
        return staged_state.have_ended(
            [state for state in states if isinstance(state, StagedState)]
        )
    # Whether the ranks are at the end depends on numbers of samples alone. So a deal of one shard
    # with as many samples as the epoch can stand in for the mixture's deal.
    deal: SpanDeal = SampleDeal([sum(saved_mixture.samples)], shuffle=None, even=even)
    if global_batches is not None:
        deal = ElasticDeal(deal, global_batches.size, global_batches.spans)
    return rank_state.is_read(ranks, deal, Topology())
