"""`MixtureReader`: samples of several datasets, mixed in proportion to their weights.

Each dataset is a source of the mixture. A mixture is made of the parts of its sources: their
manifests one after another, an order that interleaves their samples, and a pipeline per source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, cast

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments import values as arguments
from shardcache_client.arguments.other_words import OTHER_WORDS
from shardcache_client.arguments.values import T_co, U
from shardcache_client.daemon.session_pool import SessionPool
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.mixture import MixedSource, MixtureOptions, weights_of
from shardcache_client.order.shards.choices import Choices
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.layouts import Grouping
from shardcache_client.order.sources.quotas import Weights
from shardcache_client.parts.dataset_arguments import ARGUMENTS
from shardcache_client.parts.dataset_parts import DatasetParts, DealtSamples
from shardcache_client.parts.epoch_reader import EpochReader
from shardcache_client.reader import ShardReader
from shardcache_client.reading.single.scattered_ranges import ScatteredRanges, ScatteredSource
from shardcache_client.stages.pipeline import PipelineBySource


def _sources_by_name(sources: Any) -> dict[str, ShardReader[Any]]:
    """Return datasets by name; the names of a list's datasets are their numbers.

    Raises TypeError for anything else.
    """
    if isinstance(sources, ShardReader):  # a dataset is iterable, but over samples
        raise TypeError
    pairs = sources.items() if isinstance(sources, Mapping) else enumerate(sources)
    by_name = arguments.by_name(pairs, "sources")
    if not all(isinstance(source, ShardReader) for source in by_name.values()):
        raise TypeError
    return by_name


# Arguments that a mixture does not have, with the remedy for each; "{}" stands for the argument.
_OTHER_WORDS = OTHER_WORDS | {
    **dict.fromkeys(("proportion", "proportions", "probabilities", "ratios"), "write weights=..."),
    **dict.fromkeys(("datasets", "streams", "components"), "write Mixture(sources, weights=...)"),
    **dict.fromkeys(ARGUMENTS, "give it to each source: ShardDataset(urls, {}=...)"),
}


class MixtureReader(ShardReader[T_co]):
    """An iterable over the samples of several datasets, mixed in proportion to their weights.

    For training without torch; `Mixture` adds support for torch, as `ShardDataset` does to
    `ShardReader`. Samples, order, epochs and states are the same as for `Mixture`, which describes
    the arguments.

    Raises ConfigError as `Mixture` does.
    """

    @arguments.checked(
        _OTHER_WORDS,
        sources=arguments.Accepts(
            'datasets by name, {"web": ShardDataset(...)}, or a list of them', _sources_by_name
        ),
        samples_per_epoch=arguments.whole(1).or_none(),
        batches=arguments.one_of("mixed", "source", "rank-source"),
    )
    def __init__(
        self,
        sources: Mapping[str, ShardReader[T_co]] | Sequence[ShardReader[T_co]],
        weights: Weights | None = None,
        *,
        samples_per_epoch: int | None = None,
        batches: Grouping = "mixed",
    ) -> None:
        # `checked` has converted the sources to this dict.
        by_name = cast("dict[str, ShardReader[T_co]]", sources)
        parts = {name: reader.parts for name, reader in by_name.items()}
        _check_sources(parts)
        first = next(iter(parts.values()))
        manifest = Manifest.concatenated([source.manifest for source in parts.values()])
        # Seeds that were drawn at random, for sources with seed=None. States keep these seeds.
        drawn_seeds = {
            name: source.samples.seed
            for name, source in parts.items()
            if source.samples.drawn_seeds
        }
        samples = DealtSamples.of(
            manifest,
            _mixture_options(parts, weights, samples_per_epoch, batches),
            first.samples.seed,
            drawn_seeds,
        )
        # Ranks match their mixtures by the names of the sources, as other datasets by their urls.
        group = self._runtime.rank_group(
            first.group.named_ranks, list(parts), first.sessions.timeout_s
        )
        mixed = replace(
            first,
            urls=(),  # only the sources have urls
            samples=samples,
            group=group,
            sessions=SessionPool(*first.sessions.settings),  # the source may be read as well
            pipeline=_pipeline(parts),
            scattered=_scattered(parts),
        )
        self.epoch_reader = EpochReader(mixed, self._runtime)

    if TYPE_CHECKING:

        def map(self, function: Callable[[T_co], U]) -> MixtureReader[U]:
            """See `ShardReader.map`."""

    @arguments.checked(epoch=arguments.whole(0))
    def samples_of(self, epoch: int) -> dict[str, int]:
        """Return the number of samples of each source in an epoch, over all ranks.

        If the mixture was changed in the middle of that epoch, the numbers are those of the rest of
        the epoch.
        """
        deal = self.epoch_reader.epochs.deal
        assert isinstance(deal, SpanDeal)
        mixture = deal.mixture_of(epoch)
        assert mixture is not None
        return {name: source.samples for name, source in mixture.epoch_sources.items()}

    def indexed(self, window: int = 4) -> NoReturn:
        """Raise ConfigError: the samples of a mixture have no numbers."""
        raise ConfigError(
            "samples of a mixture have no numbers", remedy="use indexed() of its sources"
        )

    def _selected(self, choices: Choices) -> NoReturn:
        """Raise ConfigError; `Selecting` calls this for a selection of samples."""
        raise ConfigError(
            "samples of a mixture cannot be chosen", remedy="choose among those of its sources"
        )

    def _rows_of_tables(self) -> NoReturn:
        """Raise ConfigError; `Selecting` calls this for the rows of the tables of samples."""
        self._selected(())  # a selection by tables of samples is refused with the same error


def _mixture_options(
    parts: Mapping[str, DatasetParts],
    weights: Weights | None,
    samples_per_epoch: int | None,
    batches: Grouping,
) -> MixtureOptions:
    """Return the options of the order in which a mixture's samples come.

    Args:
        parts: the parts of each source, by its name.
        weights: weights of the sources; None for the sizes of the sources.
        samples_per_epoch: None for as many samples as all sources together have.
        batches: see `Mixture`.
    """
    sources = tuple(_mixed(name, source.samples) for name, source in parts.items())
    samples = samples_per_epoch or sum(source.samples for source in sources)
    first = next(iter(parts.values())).samples.deal_options
    _check_batches(batches, first)
    return MixtureOptions(
        shuffle=None,  # each source has its own shuffle
        even=first.even,
        batch_size=first.batch_size,
        samples_per_epoch=samples,
        global_batch_size=first.global_batch_size,
        spans=first.spans,
        sources=sources,
        weights=weights_of(weights, sources),
        grouping=batches,
    )


def _check_batches(batches: Grouping, deal_options: DealOptions) -> None:
    """Raise ConfigError if batches cannot be of one source."""
    if batches == "mixed":
        return
    if deal_options.even is None:
        raise ConfigError(
            f"batches={batches!r} gives every rank whole batches, but with even=None "
            "some ranks get fewer samples",
            remedy='give the sources even="pad" or "drop"',
        )
    if batches == "rank-source" and deal_options.global_batch_size is not None:
        raise ConfigError(
            'batches="rank-source" depends on the ranks, and global batches do not',
            remedy='write batches="source", whose global batches are of one source each',
        )


def _mixed(name: str, samples: DealtSamples) -> MixedSource:
    """Return a dataset's samples as a source of a mixture, which keeps the dataset's order."""
    options = samples.deal_options
    return MixedSource(name, samples.manifest, options.shuffle, options.unit)


def _pipeline(parts: Mapping[str, DatasetParts]) -> PipelineBySource:
    """Return the pipeline of a mixture, which applies to a sample the pipeline of its source."""
    shards = [len(source.manifest) for source in parts.values()]
    first_shards = tuple(accumulate(shards[:-1], initial=0))
    pipelines = {name: source.pipeline for name, source in parts.items()}
    return PipelineBySource(sources=pipelines, first_shards=first_shards)


def _scattered(parts: Mapping[str, DatasetParts]) -> ScatteredRanges | None:
    """Return the ranges of samples that are read one by one; None if there are no such samples."""
    sources: list[ScatteredSource] = []
    first_shard = 0
    for source in parts.values():
        if source.scattered is not None:
            sources += source.scattered.sources_from(first_shard)
        first_shard += len(source.manifest)
    return ScatteredRanges(sources) if sources else None


def _check_sources(sources: Mapping[str, DatasetParts]) -> None:
    """Raise ConfigError if a source cannot be mixed, or if the sources' common options differ."""
    if not sources:
        raise ConfigError(
            "a Mixture needs at least one source",
            remedy='give at least one: Mixture({"name": ShardDataset(...)})',
        )
    for name, parts in sources.items():
        _check_mixable(name, parts)
    (first_name, first), *others = sources.items()
    for name, parts in others:
        options = parts.shared_options()
        for option, value in first.shared_options().items():
            if options[option] != value:
                raise ConfigError(
                    f"sources {first_name!r} and {name!r} differ in {option}",
                    remedy="give the same to all sources",
                )


def _check_mixable(name: str, parts: DatasetParts) -> None:
    """Raise ConfigError if a source cannot be mixed."""
    manifest = parts.manifest
    deal_options = parts.samples.deal_options
    if isinstance(deal_options, MixtureOptions):
        raise ConfigError(
            f"source {name!r} is a mixture itself", remedy="give all sources to one mixture"
        )
    if parts.stage is not None:
        raise ConfigError(
            f"source {name!r} yields groups of samples",
            remedy="mix the samples, and pack the mixture",
        )
    if manifest.counts is None:
        raise manifest.uncounted_error(f"source {name!r} cannot be mixed")
    if not manifest.samples:
        raise ConfigError(f"the shards of source {name!r} contain no samples")
    if deal_options.samples_per_epoch is not None:
        raise ConfigError(
            f"source {name!r} has samples_per_epoch", remedy="give it to the Mixture instead"
        )
