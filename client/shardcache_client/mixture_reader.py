"""`MixtureReader`: several datasets mixed in proportion, as an iterable that needs no torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

from shardcache.errors import ConfigError
from shardcache_client.arguments import OTHER_WORDS, Accepts, T_co, U, checked, whole
from shardcache_client.decoding.pipeline import PipelineBySource
from shardcache_client.order.deal import SpanDeal
from shardcache_client.order.manifest import Choices, Manifest
from shardcache_client.order.mixture import MixedSource, MixtureAssignment, SourceQuotas, Weights
from shardcache_client.position.state import ReaderState
from shardcache_client.reader import ARGUMENTS, ShardReader
from shardcache_client.reading.stream import StreamSettings


def _named(sources: Any) -> dict[str, ShardReader[Any]]:
    named = sources.items() if isinstance(sources, Mapping) else enumerate(sources)
    found = {str(name): source for name, source in named}
    if isinstance(sources, ShardReader) or not all(isinstance(source, ShardReader) for source in found.values()):
        raise TypeError
    return found


_WORDS = OTHER_WORDS | {
    **dict.fromkeys(("proportion", "proportions", "probabilities", "ratios"), "write weights=..."),
    **dict.fromkeys(("datasets", "streams", "components"), "write Mixture(sources, weights=...)"),
    **dict.fromkeys(ARGUMENTS, "give it to each source: ShardDataset(urls, {}=...)"),
}


class MixtureReader(ShardReader[T_co]):
    """An iterable over the samples of several datasets, mixed in proportion to their weights.

    For training without torch; `Mixture` adds what torch has, as `ShardDataset` does to `ShardReader`. Samples, order,
    epochs and states are those of `Mixture`, which describes the arguments.

    Raises ConfigError as `Mixture` does.
    """

    @checked(
        _WORDS,
        sources=Accepts('datasets by name, {"web": ShardDataset(...)}, or a list of them', _named),
        samples_per_epoch=whole(1).or_none(),
    )
    def __init__(
        self,
        sources: Mapping[str, ShardReader[T_co]] | Sequence[ShardReader[T_co]],
        weights: Weights | None = None,
        *,
        samples_per_epoch: int | None = None,
    ) -> None:
        sources = _named(sources)
        first = _first_of_alike(sources)
        mixed = tuple(
            MixedSource(name, reader.manifest, reader._dealing.shuffle, reader._dealing.unit)
            for name, reader in sources.items()
        )
        samples = samples_per_epoch or sum(source.samples for source in mixed)
        self._schedule = SourceQuotas.of(weights, mixed, samples)
        self._group = self._ranks_of(first._group.given, list(sources), first._settings.sessions.timeout_s)
        manifest = Manifest.joined([source.manifest for source in mixed])
        dealing = MixtureAssignment(
            None,
            first._dealing.even,
            first._dealing.batch_size,
            samples,
            first._dealing.global_batch_size,
            first._dealing.spans,
            sources=mixed,
            schedule=self._schedule,
        )
        shards = [len(source.manifest) for source in mixed[:-1]]
        pipelines = {name: reader._settings.pipeline for name, reader in sources.items()}
        settings = StreamSettings(
            sessions=copy.copy(first._settings.sessions),
            manifest=manifest,
            deal=dealing.deal(manifest),
            pipeline=PipelineBySource(sources=pipelines, firsts=tuple(accumulate(shards, initial=0))),
            handover=first._settings.handover,
            epochs=first._settings.epochs,
            datasets=dealing.identities(manifest),
            seeds={name: reader.seed for name, reader in sources.items() if reader._settings.seeds},
        )
        self._names = tuple(sources)
        self._assemble(settings, dealing, first.seed, first._on_error, first._job)

    if TYPE_CHECKING:

        def map(self, function: Callable[[T_co], U]) -> MixtureReader[U]:
            """See `ShardReader.map`."""

    @checked(epoch=whole(0))
    def samples_of(self, epoch: int) -> dict[str, int]:
        """Return the number of samples of each source in an epoch, over all ranks."""
        return dict(zip(self._names, self._schedule.samples(epoch), strict=True))

    def indexed(self, window: int = 4) -> NoReturn:
        """Raise ConfigError: the samples of a mixture have no numbers."""
        raise ConfigError("a mixture has no samples by number", remedy="use indexed() of its sources")

    def _selected(self, choices: Choices) -> NoReturn:
        raise ConfigError("samples of a mixture cannot be chosen", remedy="choose among those of its sources")

    def _rows_of_tables(self) -> NoReturn:
        self._selected(())

    def _check_saved(self, saved: ReaderState) -> None:
        """Raise ConfigError also if weights of this or an earlier epoch are others; those of later ones may change."""
        super()._check_saved(saved)
        deal = self._settings.deal
        assert isinstance(deal, SpanDeal)
        for name, numbers in deal.sources_of(saved.epoch).items():
            told = saved.sources.get(name, {})
            if any(told.get(key) != number for key, number in numbers.items()):
                raise ConfigError(
                    f"in epoch {saved.epoch} of the state, source {name!r} has {told.get('samples')} samples from its "
                    f"sample {told.get('start')} on; by these weights, {numbers['samples']} from {numbers['start']} on",
                    remedy="give the weights of the run that saved the state up to this epoch; those of later epochs "
                    "may differ",
                )


def _first_of_alike(sources: Mapping[str, ShardReader[Any]]) -> ShardReader[Any]:
    """Return the first source. Raises ConfigError if options of the job differ, or a source cannot be mixed."""
    if not sources:
        raise ConfigError("a mixture of no sources", remedy='give at least one: Mixture({"name": ShardDataset(...)})')
    for name, reader in sources.items():
        _check(name, reader)
    (name, first), *others = sources.items()
    for other, reader in others:
        for option, value in _options(first).items():
            if _options(reader)[option] != value:
                raise ConfigError(
                    f"sources {name!r} and {other!r} differ in {option}", remedy="give the same to all sources"
                )
    return first


def _check(name: str, reader: ShardReader[Any]) -> None:
    if isinstance(reader, MixtureReader):
        raise ConfigError(f"source {name!r} is a mixture itself", remedy="give all sources to one mixture")
    if reader.manifest.counts is None:
        raise ConfigError(
            f"source {name!r} cannot be mixed: {reader.manifest.uncounted} of its {len(reader.manifest)} shards were "
            "never counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use index.json as the url",
        )
    if not reader.manifest.samples:
        raise ConfigError(f"the shards of source {name!r} contain no samples")
    if reader._dealing.samples_per_epoch is not None:
        raise ConfigError(
            f"source {name!r} has samples_per_epoch", remedy="give it to the mixture, whose epochs are those of all"
        )


def _options(reader: ShardReader[Any]) -> dict[str, object]:
    """Return the options that the sources of a mixture share, by the names of the arguments."""
    handover = reader._settings.handover
    return {
        "rank and world_size, or in mesh": reader._group.given,
        "batch_size": reader._dealing.batch_size,
        "global_batch_size": reader._dealing.global_batch_size,
        "canonical_nodes": reader._dealing.spans if reader._elastic else None,
        "even": reader._dealing.even,
        "epochs": reader._settings.epochs,
        "on_error": reader._on_error,
        "job": reader._job,
        "zero_copy": handover and (handover.extensions or "all"),
        "socket, daemon, fallback, timeout_s or partial_reads": reader._settings.sessions.settings,
    }
