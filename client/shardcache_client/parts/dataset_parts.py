"""The parts of a dataset: its samples in their order, how they are read, and by which ranks.

A reader, a loader and a mixture are made of these values. They are passed as public attributes, so
that none of these classes needs another's private attributes.

- A deal divides the samples of each epoch, or whole shards, among the readers.
- Samples are counted if the number of samples of every shard is known.
- A state is a saved position in an epoch. It keeps seeds that were drawn at random.
- A mixture reads from several datasets, its sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from shardcache.shared.exceptions import ConfigError
from shardcache_client.daemon.session_pool import SessionPool
from shardcache_client.handlers import Handler, reraise
from shardcache_client.order.dealing.deal import Deal
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.shards.choices import Choices
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.position.mixture_state import Terms
from shardcache_client.ranks.group import RankGroup
from shardcache_client.reading.single.scattered_ranges import ScatteredRanges
from shardcache_client.stages.pipeline import Pipeline
from shardcache_client.stages.stage import Stage

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


@dataclass(frozen=True)
class DealtSamples:
    """A dataset's samples, and how each of its epochs is divided among readers.

    Attributes:
        manifest: the shards that have the samples.
        deal_options: the options of the order.
        deal: division of the samples, or of the shards if these are not counted.
        identifiers: identifiers of the dataset in states: under True in states of counted samples,
            under False in states of uncounted shards.
        seed: the seed that the user gave, or that was drawn at random.
        drawn_seeds: seeds that were drawn at random, by source; see `RankState`.
    """

    manifest: Manifest
    deal_options: DealOptions
    deal: Deal
    identifiers: Mapping[bool, str]
    seed: int
    drawn_seeds: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        deal_options: DealOptions,
        seed: int = 0,
        drawn_seeds: Mapping[str, int] | None = None,
    ) -> Self:
        """Deal the samples of a manifest. Raises ConfigError if the options do not allow it.

        Args:
            manifest: the shards that have the samples.
            deal_options: the options of the order.
            seed: the seed that the user gave, or that was drawn at random.
            drawn_seeds: seeds that were drawn at random, by source; None for none.
        """
        return cls(
            manifest,
            deal_options,
            deal=deal_options.deal(manifest),
            identifiers=deal_options.identities(manifest),
            seed=seed,
            drawn_seeds=drawn_seeds or {},
        )

    def selected(self, choices: Choices) -> Self:
        """Return only the chosen samples. Raises ConfigError if there are none."""
        manifest = self.manifest.select(choices)
        if not manifest.samples:
            raise ConfigError("no sample is selected", remedy="select at least one")
        return self.of(manifest, self.deal_options, self.seed, self.drawn_seeds)

    def in_batches_of(self, size: int) -> Self:
        """Return the same samples, for batches of another size."""
        deal_options = replace(self.deal_options, batch_size=size)
        return replace(self, deal_options=deal_options, deal=deal_options.deal(self.manifest))

    @property
    def terms(self) -> Terms:
        """The drawn seeds and the change of the mixture, which determine the order; see `Terms`."""
        return Terms(self.drawn_seeds, self.deal_options.change)

    def on_terms(self, terms: Terms) -> Self:
        """Return the same samples in the order of another run.

        The seeds that the other run has drawn replace this run's drawn seeds, and the other run's
        change of a mixture applies.
        """
        seeds = self._drawn_seeds_with(terms.seeds)
        if Terms(seeds, terms.change) == self.terms:
            return self
        deal_options = self.deal_options.reseeded(seeds).after(terms.change)
        return self.of(self.manifest, deal_options, seeds.get("", self.seed), seeds)

    def _drawn_seeds_with(self, others: Mapping[str, int]) -> Mapping[str, int]:
        """Return the drawn seeds by source, with another run's seeds in place of this run's.

        A seed that the user gave to this run stays: the other run's seed is then left out.

        Args:
            others: seeds that the other run has drawn, by source.
        """
        replaced = {name: others.get(name, seed) for name, seed in self.drawn_seeds.items()}
        # The seeds of sources that this mixture lacks are kept for later states.
        own_names = self.deal_options.source_names
        kept = {name: seed for name, seed in others.items() if name not in own_names}
        return replaced | kept

    def deal_of(self, *, counted: bool) -> Deal:
        """Return the deal of samples (`counted`), or of whole shards.

        Raises ConfigError if samples are to be dealt that are not counted.
        """
        if counted == self.deal.counted:
            return self.deal
        return self.deal_options.deal(self.manifest, counted=counted)

    def uneven_deal(self, deal: Deal) -> Deal:
        """Return a deal that gives each sample or shard once, so ranks may get unequal numbers."""
        if deal.counted == self.deal.counted:
            return self._uneven
        return self._uneven_options.deal(self.manifest, counted=deal.counted)

    @cached_property
    def _uneven(self) -> Deal:
        """The result of `uneven_deal` for a deal of the same kind as `deal`.

        It is kept, since a deal computes its order once and keeps it.
        """
        return self._uneven_options.deal(self.manifest, counted=self.deal.counted)

    @property
    def _uneven_options(self) -> DealOptions:
        """The options without padding, dropping and global batches."""
        return replace(self.deal_options, even=None, global_batch_size=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetParts:
    """The parts of a dataset.

    A derived dataset, such as a filtered one, is a copy with other parts and a position of its own.

    Attributes:
        urls: urls as the user gave them.
        samples: the samples, in their order.
        group: the ranks that read the samples.
        sessions: connections to the daemon.
        job: name of the job in `shardcache status`.
        pipeline: makes items of samples that have been read.
        scattered: the range of each sample's bytes in its shard, for `shuffle="global"`, which
            reads samples one by one; None if whole shards are read.
        stage: regroups the samples; None if each sample is an item.
        handover: passes samples to other processes without a copy; None if they are copied.
        on_error: handler that decides about samples and shards that cannot be read.
        epochs: number of epochs in the training run; None for no limit.
    """

    urls: Sequence[str]
    samples: DealtSamples
    group: RankGroup
    sessions: SessionPool
    job: str
    pipeline: Pipeline = field(default_factory=Pipeline)
    scattered: ScatteredRanges | None = None
    stage: Stage | None = None
    handover: Handover | None = None
    on_error: Handler = reraise
    epochs: int | None = None

    @property
    def manifest(self) -> Manifest:
        """The shards, with sizes and sample counts where known."""
        return self.samples.manifest

    @property
    def fixes_batch_size(self) -> bool:
        """True if the batch size determines which samples come together; see `DealOptions`."""
        return self.samples.deal_options.fixes_batch_size

    @property
    def has_global_batches(self) -> bool:
        """True if the dataset has global batches: see `ElasticDeal`."""
        return self.samples.deal_options.global_batch_size is not None

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of this rank.

        Raises ConfigError if ranks cannot have equal parts of a global batch.
        """
        return self.samples.deal_options.batch_size_of(self.group.ranks.world_size)

    def shared_options(self) -> dict[str, object]:
        """Return the options that must be equal for all sources of a mixture.

        The keys name the arguments in messages such as "sources 'a' and 'b' differ in even".
        """
        deal_options = self.samples.deal_options
        zero_copy: object = None
        if self.handover is not None:
            zero_copy = self.handover.extensions or "all"
        return {
            "rank and world_size, or in mesh": self.group.named_ranks,
            "batch_size": deal_options.batch_size,
            "global_batch_size": deal_options.global_batch_size,
            "canonical_nodes": deal_options.spans if self.has_global_batches else None,
            "even": deal_options.even,
            "epochs": self.epochs,
            "on_error": self.on_error,
            "job": self.job,
            "zero_copy": zero_copy,
            "socket, daemon, fallback, timeout_s or partial_reads": self.sessions.settings,
        }
