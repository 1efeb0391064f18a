"""`ShardReader` and `MixtureReader`: tar shards, and mixtures of them, as iterables that need no torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from shardcache.errors import ConfigError, NotFoundError
from shardcache.protocol import patterns_from_here
from shardcache.tarindex.contents import Row
from shardcache_client import arguments
from shardcache_client.arguments import T_co, U
from shardcache_client.daemon.choice import DaemonChoice, Fallback, Patience, Which
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import SessionPool, resolve
from shardcache_client.decoders import Spec
from shardcache_client.decoding import Missing, Pipeline, PipelineBySource
from shardcache_client.epoch_reader import EpochReader
from shardcache_client.files import Sample, TokenBlocks
from shardcache_client.handlers import ANY_HANDLER, Handler, handler_of, reraise
from shardcache_client.indexed import IndexedShards, Selecting, row_of, tables_of
from shardcache_client.order.deal import Assignment, SpanDeal
from shardcache_client.order.manifest import Choices, Manifest
from shardcache_client.order.mixture import MixedSource, MixtureAssignment, SourceQuotas, Weights
from shardcache_client.order.rounds import Even, Shuffle, Topology
from shardcache_client.position.state import Saved
from shardcache_client.ranks.environment import job_name
from shardcache_client.ranks.group import MeshRanks, RankGroup, given_ranks
from shardcache_client.settings import DatasetSettings
from shardcache_client.stages.pack import Block, Pack, numpy_block
from shardcache_client.stages.stage import Stage

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")


def _zero_copy(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    names = arguments.NAMES.converted(value)
    if "" in names:
        raise ValueError
    return value if isinstance(value, str) else names


def _decode(value: Any) -> Any:
    is_table = isinstance(value, Mapping) and arguments.NAMES.converted(value)
    return value if is_table or isinstance(value, str) else arguments.FUNCTION.converted(value)


def _missing(value: Any) -> Any:
    return value if isinstance(value, Mapping) else arguments.one_of("error", "skip").converted(value)


MAX_TOKENS = 2**31 - 1  # offsets in blocks are int32

ARGUMENTS = {
    "urls": arguments.URLS,
    "shuffle": arguments.flag("; shuffle_window is the number of shards whose samples are mixed"),
    "shuffle_window": arguments.whole(0, arguments.MAX_BATCH),
    "seed": arguments.whole().or_none("None, for a random one"),
    "canonical_nodes": arguments.whole(1, arguments.MAX_PROCESSES),
    "even": arguments.one_of("pad", "drop", None),
    "samples_per_epoch": arguments.whole(1).or_none(),
    "epochs": arguments.whole(1).or_none(),
    "batch_size": arguments.whole(1, arguments.MAX_BATCH),
    "global_batch_size": arguments.whole(1, arguments.MAX_BATCH).or_none(),
    "tokens": arguments.instance("TokenBlocks(length)", TokenBlocks).or_none(),
    "decode": arguments.Accepts(
        'the name of an image decoder, a table such as {"jpg": "rgb8"}, or a function', _decode
    ).or_none(),
    "members": arguments.NAMES.or_none("None for all"),
    "missing": arguments.Accepts('"error", "skip", or a dict of default values', _missing),
    "on_error": arguments.Accepts(ANY_HANDLER, handler_of),
    "job": arguments.JOB.or_none(),
    "socket": arguments.PATH.or_none(),
    "rank": arguments.whole(0, arguments.MAX_PROCESSES).or_none(),
    "world_size": arguments.whole(1, arguments.MAX_PROCESSES).or_none(),
    "mesh": arguments.Accepts(
        'the DeviceMesh itself, such as mesh["dp"], or a ProcessGroup that this process belongs to', MeshRanks.of
    ).or_none(),
    "timeout_s": arguments.SECONDS,
    "partial_reads": arguments.flag(),
    "daemon": arguments.DAEMONS,
    "fallback": arguments.one_of("error", "private"),
    "zero_copy": arguments.Accepts("True, False, or extensions of members", _zero_copy),
}


class ShardReader(Selecting, EpochReader[T_co]):
    """An iterable over the samples of tar shards, read from the disk cache that the node's shardcache daemon fills.

    For training without torch: each process of the job makes one, with its rank and the number of processes, and gets
    its share of the samples. `ShardDataset` adds what torch has: DataLoader workers, and ranks that compare notes.

        reader = ShardReader(urls, shuffle=True, rank=jax.process_index(), world_size=jax.process_count())

    Samples, order, epochs and states are those of `ShardDataset`, which describes the arguments; a state of one can be
    loaded into the other. Ranks without torch.distributed share nothing: if they see different shards, or end an epoch
    early on some ranks alone, nobody notices. Use the same index file on all ranks, and `set_epoch`.
    A framework that reads ahead needs the state with each batch: yield `batch, reader.state_dict()`.

    Raises the errors of `ShardDataset`.
    """

    @arguments.checked(arguments.OTHER_WORDS, **ARGUMENTS)
    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        shuffle: bool = False,
        shuffle_window: int = 8,
        seed: int | None = 0,
        canonical_nodes: int = 1,
        even: Even = "pad",
        samples_per_epoch: int | None = None,
        epochs: int | None = None,
        batch_size: int = 1,
        global_batch_size: int | None = None,
        tokens: TokenBlocks | None = None,
        decode: Callable[[Sample], T_co] | Mapping[str, Spec] | str | None = None,
        members: Iterable[str] | None = None,
        missing: Missing = "error",
        on_error: Handler | str = reraise,
        job: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        timeout_s: float = 300.0,
        partial_reads: bool = True,
        daemon: Which = "auto",
        fallback: Fallback = "error",
        zero_copy: bool | str | Collection[str] = False,
    ) -> None:
        if global_batch_size is not None:
            arguments.check_global_batches(
                global_batch_size, batch_size=batch_size, even=even, canonical_nodes=canonical_nodes
            )
        if tokens is not None and zero_copy:
            raise ConfigError("zero_copy has no meaning for blocks of tokens, which are arrays", remedy="omit it")
        pipeline = Pipeline.of(decode, members, missing, tokens)
        _check_zero_copy(zero_copy, pipeline)
        choice, reader = DaemonChoice.of(socket, daemon, fallback), ReaderIdentity(job or job_name())
        self._urls = patterns_from_here(urls)
        self._group = self._ranks_of(given_ranks(mesh, rank, world_size), self._urls, timeout_s)
        self._group.refuse_resharding()

        manifest = self._group.settle(lambda: resolve(choice, reader, self._urls, timeout_s))
        if tokens is not None:
            manifest = manifest.of_blocks(tokens.count)
        seeds: dict[str, int] = {}
        if seed is None:
            seeds[""] = seed = self._group.draw_seed()
            if not self._group.ranks.rank:
                text = "seed=None: the seed is %d; states keep it, and seed=%d gives the same order again"
                log.warning(text, seed, seed)
        shuffling = Shuffle(seed, shuffle_window, canonical_nodes) if shuffle else None
        unit = "" if tokens is None else repr(tokens)
        dealing = Assignment(
            shuffling, even, batch_size, samples_per_epoch, global_batch_size, spans=canonical_nodes, unit=unit
        )
        partial_reads = bool(partial_reads and not zero_copy and tokens is None)
        settings = DatasetSettings(
            sessions=SessionPool(choice, Patience(timeout_s), partial_reads=partial_reads),
            manifest=manifest,
            deal=dealing.deal(manifest),
            pipeline=pipeline,
            handover=_handover(zero_copy),
            epochs=epochs,
            datasets=dealing.identities(manifest),
            seeds=seeds,
        )
        self._assemble(settings, dealing, seed, handler_of(on_error), reader.job)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.manifest!r}, epoch={self.epoch}, job={self._job!r})"

    def _ranks_of(self, given: Topology | MeshRanks | None, urls: Sequence[str], timeout_s: float) -> RankGroup:
        return RankGroup(given)

    def __len__(self) -> int:
        """Return the number of samples that this rank reads per epoch.

        Raises TypeError, as Python expects of `__len__`, while the number is unknown.
        """
        samples = self._deal().rank_size(self.topology())
        if self._settings.stage is not None:
            raise TypeError("len() is unknown until the samples have been read, which a stage regroups")
        if self._settings.pipeline.filters:
            raise TypeError("len() is unknown because of filter()")
        if samples is None:
            raise TypeError(f"the number of samples is unknown: {self._why_not_counted()}")
        return samples

    if not TYPE_CHECKING:  # to a type checker, there are none

        def __getitem__(self, number: object) -> NoReturn:
            """Raise TypeError: samples come in the order of the epoch. See `indexed`."""
            numbers = f".subset(range({number.start or 0}, {number.stop}))" if isinstance(number, slice) else ""
            raise TypeError(
                f"a {type(self).__name__} has no samples by number; write {numbers or f'.indexed()[{number!r}]'}"
            )

    @arguments.checked(function=arguments.FUNCTION)
    def map(self, function: Callable[[T_co], U]) -> ShardReader[U]:
        """Return a dataset that yields `function(item)` for each item of this one.

        It has the same shards and order, begins with this one's epoch, and keeps epochs and states of its own. An
        exception of the function becomes a DecodeError, which goes to `on_error`.
        """
        self._check_are_samples("map()")
        return cast(ShardReader[U], self._derived(pipeline=self._settings.pipeline.then(function)))

    @arguments.checked(function=arguments.FUNCTION)
    def filter(self, function: Callable[[T_co], object]) -> Self:
        """Return a dataset that yields the items of this one for which `function(item)` is true.

        Its length is unknown, and ranks get different numbers of items: with several ranks, the dataset needs
        `even=None`, and a state of all ranks to resume from. Otherwise as `map`.
        """
        self._check_are_samples("filter()")
        return self._derived(pipeline=self._settings.pipeline.then(function, is_filter=True))

    def _rows_of_tables(self) -> Iterator[tuple[str, Row]]:
        if self._settings.pipeline.blocks is not None:
            raise ConfigError(
                "select() chooses samples of the shards, not blocks of their tokens",
                remedy="leave documents out when the shards are written; subset() and split() choose among blocks",
            )
        choice, patience, partial_reads = self._settings.sessions.settings
        options: dict[str, Any] = {"job": self._job, "rank": 0, "world_size": 1, "timeout_s": patience.limit_s}
        options |= {"epochs": 1, "partial_reads": partial_reads, **choice.arguments}
        try:
            yield from _Tables(tables_of(self._urls), decode=row_of, **options)
        except NotFoundError as exn:
            raise ConfigError(
                "select() needs a table of the samples, which is missing",
                url=exn.url,
                remedy="write it next to the index: shardcache index URL... -o index.json --samples",
            ) from exn

    def _selected(self, choices: Choices) -> Self:
        self._check_are_samples("choosing some of them")
        manifest = self.manifest.select(choices)
        if not manifest.samples:
            raise ConfigError("no sample is selected", remedy="select at least one")
        datasets = self._dealing.identities(manifest)
        derived = self._derived(manifest=manifest, deal=self._dealing.deal(manifest), datasets=datasets)
        derived.manifest = manifest
        derived._bookmark.forget_states()  # they are of the dataset that this one is selected from
        return derived

    @arguments.checked(window=arguments.whole(1))
    def indexed(self, window: int = 4) -> IndexedShards[T_co]:
        """Return the same samples as a map-style dataset: by number, in the order of `urls`, whatever `shuffle` says.

        Args:
            window: number of shards that each process holds at a time.

        Raises ConfigError if the samples are not counted, or if this dataset leaves samples out.
        """
        self._check_are_samples("indexed()")
        mesh = self._group.given if isinstance(self._group.given, MeshRanks) else None
        return IndexedShards(self._settings, ReaderIdentity(self._job), window, mesh)

    @arguments.checked(
        max_tokens=arguments.whole(1, MAX_TOKENS),
        length=arguments.FUNCTION.or_none(),
        tokens=arguments.FUNCTION.or_none(),
        window=arguments.whole(2, arguments.MAX_BATCH),
        on_error=arguments.Accepts(ANY_HANDLER, handler_of),
        timeout_s=arguments.SECONDS,
    )
    def pack(
        self,
        max_tokens: int,
        length: Callable[[T_co], int] | None = None,
        *,
        tokens: Callable[[T_co], Any] | None = None,
        window: int = 512,
        on_error: Handler | str = reraise,
        timeout_s: float = 300.0,
    ) -> ShardReader[Block[T_co]]:
        """Return a dataset of blocks of whole samples, with epochs and states of its own: training without padding::

            dataset = ShardDataset(urls, shuffle=True, decode={"npy": "numpy"})
            blocks = dataset.pack(8_192, tokens=lambda sample: sample["npy"])
            for block in blocks.loader(num_workers=4):
                block["tokens"], block["positions"], block["cu_seqlens"], block["max_seqlen"]

        Samples are put together where they fit best, among `window` of them, into blocks of at most `max_tokens`
        tokens; none is cut, and each comes once. A `Block` has the samples, and the arrays that attention within
        samples takes. Functions are given either what a training loop concatenates by itself (`length`), or what is
        concatenated here (`tokens`); the samples are in the block in both cases, with their keys and sources.

        Every rank gets the same number of blocks. Ranks with short samples get ahead and, near the end of an epoch,
        give blocks that are less full; one that has given all of its samples repeats the last one in each block that
        others still need. Samples that are `window` or more places apart keep their order. In a mixture, a block has
        samples of all sources, in the proportions that the mixture has among any samples.

        The same ranks and workers resume with exactly the next block; others with exactly the samples that are left.
        As ranks are at different places, that takes the states of all ranks.

        Args:
            max_tokens: maximum number of tokens in a block.
            length: returns the number of tokens of a sample, always the same for the same sample.
            tokens: in place of `length`, returns the tokens themselves: a tensor or array of one dimension. It is
                called by the process that packs, which is the training loop's with `loader()`: tokenize in `map`.
            window: number of samples that are kept in memory; by each worker, if a plain DataLoader reads the blocks. A
                larger window leaves less room in blocks, where samples are long.
            on_error: called with the SampleError of a sample that is longer than `max_tokens`, has no tokens, or whose
                length is not a whole number. See `handlers`.
            timeout_s: how long a rank waits for the others to fill their windows.

        Raises:
            ConfigError: an argument is invalid, numpy is missing, or the dataset has `global_batch_size`, or items that
                are no samples; or, when iterating, the ranks share no key-value store over which to agree, or one of
                them has no samples at all.
            RankTimeoutError, RanksError: a rank does not answer.
        """
        self._check_can_pack(length, tokens)
        agreement = self._group.agreements(f"blocks/{max_tokens}/{window}", timeout_s)
        stage = Pack(max_tokens, window, length, tokens, handler_of(on_error), self._block_of, agreement)
        return cast("ShardReader[Block[T_co]]", self.regrouped(stage))

    _block_of = staticmethod(numpy_block)

    def _check_can_pack(self, length: object, tokens: object) -> None:
        if (length is None) == (tokens is None):
            raise ConfigError(
                "pack() needs the lengths of samples",
                remedy="give it length=, a function that returns one; or tokens=, one that returns the tokens",
            )
        if self.has_global_batches:
            raise ConfigError(
                "the dataset has global_batch_size, and blocks have different numbers of samples",
                remedy="omit global_batch_size",
            )
        try:
            import numpy  # noqa: F401
        except ImportError as exn:
            raise ConfigError("blocks of samples need numpy", remedy="pip install numpy") from exn

    def regrouped(self, stage: Stage) -> Self:
        """Return a dataset that yields what a stage makes of the samples, with epochs and states of its own.

        Raises ConfigError if this one has a stage already.
        """
        self._check_are_samples("pack() or batch_by_length()")
        return self._derived(stage=stage)

    def _check_are_samples(self, what: str) -> None:
        """Raise ConfigError if a stage regroups the samples, for `what` would have to come before it."""
        if self._settings.stage is not None:
            raise ConfigError(
                f"{what} is for samples, and this dataset yields groups of them",
                remedy="write it before pack(); what is made of a block belongs in loader(collate_fn=...)",
            )

    def _derived(self, name: str = "", dealing: Assignment | None = None, **changes: Any) -> Self:
        """Return a copy with changes to its settings, and epochs and states of its own; `name` as for `of_copy`."""
        derived = copy(self)
        derived._dealing = dealing or self._dealing
        derived._settings = replace(self._settings, **changes)
        derived._group = self._group.of_copy(name)
        derived._bookmark = derived._new_bookmark()
        derived._bookmark.follow(self._bookmark)
        return derived

    def __getstate__(self) -> dict[str, Any]:
        self._group.refuse_resharding()  # a spawned worker cannot see wrappers around its parent's loader
        state = dict(self.__dict__)
        state.pop("__orig_class__", None)  # set by ShardDataset[Sample](...): a type that may not be importable
        return state


class _Tables(ShardReader[tuple[str, Row]]):
    """A reader of sample tables, all of it by one process: no counts are needed."""

    def _explain(self, topology: Topology) -> None:
        pass


def _check_zero_copy(zero_copy: bool | str | Collection[str], pipeline: Pipeline) -> None:
    """Raise ConfigError if no sample can have an extension that `zero_copy` names."""
    if isinstance(zero_copy, bool) or pipeline.members is None:
        return
    named = [zero_copy] if isinstance(zero_copy, str) else zero_copy
    unread = [extension for extension in named if not pipeline.members.reads(extension.lower())]
    if unread:
        raise ConfigError(
            f"zero_copy names the member {unread[0]!r}, which members leaves out",
            remedy="name it in members, too; or omit it from zero_copy",
        )


def _handover(zero_copy: bool | str | Collection[str]) -> Handover | None:
    if not zero_copy:
        return None
    from shardcache_client.sharing.handover import Handover  # needs numpy

    return Handover.of(zero_copy)


def _named(sources: Any) -> dict[str, ShardReader[Any]]:
    named = sources.items() if isinstance(sources, Mapping) else enumerate(sources)
    found = arguments.by_name(named, "sources")
    if isinstance(sources, ShardReader) or not all(isinstance(source, ShardReader) for source in found.values()):
        raise TypeError
    return found


_WORDS = arguments.OTHER_WORDS | {
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

    @arguments.checked(
        _WORDS,
        sources=arguments.Accepts('datasets by name, {"web": ShardDataset(...)}, or a list of them', _named),
        samples_per_epoch=arguments.whole(1).or_none(),
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
        settings = DatasetSettings(
            sessions=copy(first._settings.sessions),
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

    @arguments.checked(epoch=arguments.whole(0))
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

    def _check_saved(self, saved: Saved) -> None:
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
        raise ConfigError(
            "a Mixture needs at least one source", remedy='give at least one: Mixture({"name": ShardDataset(...)})'
        )
    for name, reader in sources.items():
        _check(name, reader)
    (name, first), *others = sources.items()
    for other, reader in others:
        for option, value in shared_options(first).items():
            if shared_options(reader)[option] != value:
                raise ConfigError(
                    f"sources {name!r} and {other!r} differ in {option}", remedy="give the same to all sources"
                )
    return first


def _check(name: str, reader: ShardReader[Any]) -> None:
    if isinstance(reader, MixtureReader):
        raise ConfigError(f"source {name!r} is a mixture itself", remedy="give all sources to one mixture")
    if reader._settings.stage is not None:
        raise ConfigError(f"source {name!r} yields groups of samples", remedy="mix the samples, and pack the mixture")
    if reader.manifest.counts is None:
        raise reader.manifest.uncounted_error(f"source {name!r} cannot be mixed")
    if not reader.manifest.samples:
        raise ConfigError(f"the shards of source {name!r} contain no samples")
    if reader._dealing.samples_per_epoch is not None:
        raise ConfigError(f"source {name!r} has samples_per_epoch", remedy="give it to the Mixture instead")


def shared_options(reader: ShardReader[Any]) -> dict[str, object]:
    """Return the options that the sources of a mixture share, by the names of the arguments."""
    handover = reader._settings.handover
    return {
        "rank and world_size, or in mesh": reader._group.given,
        "batch_size": reader._dealing.batch_size,
        "global_batch_size": reader._dealing.global_batch_size,
        "canonical_nodes": reader._dealing.spans if reader.has_global_batches else None,
        "even": reader._dealing.even,
        "epochs": reader._settings.epochs,
        "on_error": reader._on_error,
        "job": reader._job,
        "zero_copy": handover and (handover.extensions or "all"),
        "socket, daemon, fallback, timeout_s or partial_reads": reader._settings.sessions.settings,
    }
