"""`ShardReader`: tar shards as an iterable over samples that needs no torch.

The class turns a user's arguments into the parts of a dataset (its samples, the way they are read,
and the ranks that share them), and hands these parts to an `EpochReader`, which reads epochs and
keeps the position. `ShardDataset` and the other datasets are subclasses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NoReturn, Self, cast

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.tarindex.contents import Row
from shardcache.shared.tarindex.key_splits import KeySplit, with_key_split
from shardcache.shared.urls.local_urls import absolute_urls
from shardcache_client.arguments import values as arguments
from shardcache_client.arguments.other_words import OTHER_WORDS
from shardcache_client.arguments.values import T_co, U
from shardcache_client.daemon.choice import DaemonChoice, DaemonName, Fallback
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.handlers import ANY_HANDLER, Handler, handler_of, reraise
from shardcache_client.indexed import IndexedShards
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.shards.choices import Choices
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.parts.dataset_arguments import ARGUMENTS, check_zero_copy
from shardcache_client.parts.dataset_parts import DatasetParts
from shardcache_client.parts.epoch_reader import EpochReader
from shardcache_client.parts.runtime import Runtime
from shardcache_client.parts.sample_tables import table_rows, tables_beside
from shardcache_client.parts.selecting import Selecting
from shardcache_client.parts.shard_source import ShardSource
from shardcache_client.parts.shuffling import (
    check_global_shuffle,
    deal_samples,
    shuffle_of,
    with_sample_ranges,
)
from shardcache_client.ranks.environment import job_name
from shardcache_client.ranks.mesh import MeshRanks, given_ranks
from shardcache_client.samples.decoders import Spec
from shardcache_client.samples.slicing import Sample
from shardcache_client.samples.token_blocks import TokenBlocks
from shardcache_client.stages.decode import Missing
from shardcache_client.stages.filter import Filter
from shardcache_client.stages.map import Map
from shardcache_client.stages.pack import Block, Pack
from shardcache_client.stages.pipeline import Pipeline
from shardcache_client.stages.stage import Stage

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")

MAX_TOKENS = 2**31 - 1  # maximum number of tokens in a block, as a block's offsets are int32


class ShardReader(Selecting, Generic[T_co]):
    """An iterable over the samples of tar shards, read from the cache that the node's daemon fills.

    For training without torch: each process of the job makes a reader, with its rank and the number
    of processes, and gets its share of the samples. `ShardDataset` adds support for torch:
    DataLoader workers, and ranks that check that their datasets agree.

        rank = jax.process_index()
        reader = ShardReader(urls, shuffle=True, rank=rank, world_size=jax.process_count())

    Samples, order, epochs and states are the same as for `ShardDataset`, which describes the
    arguments; a state of one class can be loaded into the other. Ranks without torch.distributed
    share nothing: if they see different shards, or only some of them end an epoch early, no error
    is raised. Use the same index file on all ranks, and `set_epoch`. A framework that reads ahead
    needs the state with each batch: yield `batch, reader.state_dict()`.

    Raises the errors of `ShardDataset`.
    """

    _runtime: ClassVar[Runtime] = Runtime()

    # Reads the epochs, and keeps the position. Readers of loaders, mixtures and joins are derived
    # from it.
    epoch_reader: EpochReader

    @arguments.checked(OTHER_WORDS, **ARGUMENTS)
    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        shuffle: bool | Literal["global"] = False,
        shuffle_window: int | None = None,
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
        key_split: KeySplit = "first-dot",
        on_error: Handler | str = reraise,
        job: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: Any = None,
        timeout_s: float = 300.0,
        partial_reads: bool = True,
        daemon: DaemonName = "auto",
        fallback: Fallback = "error",
        zero_copy: bool | str | Collection[str] = False,
    ) -> None:
        if global_batch_size is not None:
            arguments.check_global_batches(
                global_batch_size,
                batch_size=batch_size,
                even=even,
                canonical_nodes=canonical_nodes,
            )
        pipeline = Pipeline.of(decode, members, missing, tokens)
        check_zero_copy(zero_copy, pipeline, tokens)
        if shuffle == "global":
            check_global_shuffle(
                shuffle_window, canonical_nodes, global_batch_size, tokens, zero_copy
            )
        shuffling = shuffle_of(shuffle, shuffle_window, canonical_nodes)
        deal_options = DealOptions(
            shuffle=shuffling,
            even=even,
            batch_size=batch_size,
            samples_per_epoch=samples_per_epoch,
            global_batch_size=global_batch_size,
            spans=canonical_nodes,
            # Blocks of tokens are other samples than the tars' own, so their states differ as well.
            unit="" if tokens is None else repr(tokens),
        )
        choice = DaemonChoice.of(socket, daemon, fallback)
        # Arrays without a copy, and blocks of tokens, are slices of a whole shard's file. So they
        # cannot be read from a shard that is still arriving.
        is_partial = partial_reads and not zero_copy and tokens is None
        patterns = [with_key_split(url, key_split) for url in absolute_urls(urls)]
        source = ShardSource(patterns, choice, job or job_name(), timeout_s, is_partial)
        ranks = given_ranks(mesh, rank, world_size)
        group = self._runtime.rank_group(ranks, source.urls, timeout_s)
        samples = deal_samples(source.manifest(group, tokens), deal_options, seed, group)
        parts = replace(
            source.parts(samples, group),
            pipeline=pipeline,
            on_error=handler_of(on_error),
            epochs=epochs,
            handover=_handover(zero_copy),
        )
        if deal_options.is_global:
            parts = with_sample_ranges(parts)
        self.epoch_reader = EpochReader(parts, self._runtime)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.manifest!r}, epoch={self.epoch}, job={self.parts.job!r})"
        )

    @property
    def parts(self) -> DatasetParts:
        """The parts of this dataset: its samples, how they are read, and by which ranks."""
        return self.epoch_reader.parts

    @property
    def manifest(self) -> Manifest:
        """The shards in the order of `urls`, with sizes and sample counts if they are known.

        If torch.distributed was initialised first, all ranks use rank 0's manifest. Otherwise they
        compare their manifests when reading begins.
        """
        return self.parts.manifest

    @property
    def seed(self) -> int:
        """The seed of the shuffle: the argument, or the number that was drawn for None."""
        return self.parts.samples.seed

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of this rank, or in this rank's part of a global batch.

        Raises ConfigError if the number of ranks does not divide `global_batch_size`.
        """
        return self.parts.batch_size

    @property
    def has_global_batches(self) -> bool:
        """True if global batches do not depend on the number of ranks and workers."""
        return self.parts.has_global_batches

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return self.parts.group.topology()

    # Iterations and the position

    def __iter__(self) -> Iterator[T_co]:
        return self.epoch_reader.begin()

    def __len__(self) -> int:
        """Return the number of samples that this rank reads per epoch.

        Raises TypeError, as Python expects of `__len__`, while the number is unknown.
        """
        return self.epoch_reader.epochs.rank_samples()

    # Type checkers refuse samples by number; programs get an error that says what to write.
    if not TYPE_CHECKING:

        def __getitem__(self, number: object) -> NoReturn:
            """Raise TypeError: samples come in the order of the epoch. See `indexed`."""
            by_number = f".indexed()[{number!r}]"
            if isinstance(number, slice):
                by_number = ".subset(range(...))"
                samples = self.manifest.samples
                is_valid = number.step != 0  # Python's own slices may not have this step, either
                if samples is not None and is_valid:
                    chosen = range(samples)[number]
                    by_number = f".subset({chosen})"
            raise TypeError(f"a {type(self).__name__} has no samples by number; write {by_number}")

    @property
    def epoch(self) -> int:
        """The epoch that this process is reading, or else the next epoch that it would read."""
        return self.epoch_reader.epoch

    @property
    def position(self) -> int:
        """Number of samples of its share that this reader has passed, including bad samples."""
        return self.epoch_reader.position

    @arguments.checked(epoch=arguments.whole(0))
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration begun from now on reads.

        This holds for DataLoader workers that are running, too.
        """
        self.epoch_reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample taken: a few numbers, for any dataset.

        A state taken after an epoch's last sample resumes with the next epoch, unless other ranks
        have one sample more or fewer (`even=None`): then load their states along with it.
        """
        return self.epoch_reader.state_dict()

    def load_state_dict(self, state: object) -> None:
        """Resume from a state, exactly where it was taken, at the next iteration of its epoch.

        This is the next iteration, unless `set_epoch` sets another epoch. After a state taken at
        the end of an epoch, the next epoch is read; if `set_epoch` names the finished epoch, the
        iteration yields nothing.

        The number of ranks and workers may differ from the run that saved the state: the rest of
        the epoch is divided among the new ranks and workers. One rank's state is enough, since
        ranks take their batches in step. With `even=None`, ranks differ by a sample: one rank's
        state is then enough until that rank reaches the end of its share; after that, an error asks
        for the states of the other ranks. If the states of all ranks are given, each rank uses its
        own state.

        Args:
            state: the return value of `state_dict`, or any structure that contains such states,
                such as a StatefulDataLoader's.

        Raises ConfigError if `state` contains no state, or the state of another dataset. The next
        iteration raises ConfigError if the positions of all readers cannot be derived.
        """
        self.epoch_reader.load_state_dict(state)

    def follow(self, other: ShardReader[Any]) -> None:
        """Take over the epoch and state of another dataset of the same samples.

        Does nothing unless the other dataset's epoch or state was set since the last call.
        """
        self.epoch_reader.follow(other.epoch_reader)

    # Datasets made of this one

    @arguments.checked(function=arguments.FUNCTION)
    def map(self, function: Callable[[T_co], U]) -> ShardReader[U]:
        """Return a dataset that yields `function(item)` for each item of this dataset.

        The new dataset has the same shards and order. It begins with this dataset's epoch, and then
        has separate epochs and states. An exception of the function becomes a DecodeError, which
        goes to `on_error`.
        """
        self._check_yields_samples("map()")
        pipeline = self.parts.pipeline.then(Map(function))
        return cast("ShardReader[U]", self._derived(pipeline=pipeline))

    @arguments.checked(function=arguments.FUNCTION)
    def filter(self, function: Callable[[T_co], object]) -> Self:
        """Return a dataset that yields only the items for which `function(item)` is true.

        The new dataset is like that of `map`, except that its length is unknown, and ranks get
        different numbers of items: with several ranks, the dataset needs `even=None`, and resuming
        needs the states of all ranks.
        """
        self._check_yields_samples("filter()")
        return self._derived(pipeline=self.parts.pipeline.then(Filter(function)))

    @arguments.checked(window=arguments.whole(1))
    def indexed(self, window: int = 4) -> IndexedShards[T_co]:
        """Return the same samples as a map-style dataset: by number or key, in the order of `urls`.

        `shuffle` has no effect on the map-style dataset.

        Args:
            window: maximum number of shards that each process holds at a time.

        Raises ConfigError if the samples are not counted, or if this dataset leaves samples out.
        """
        self._check_yields_samples("indexed()")
        parts = self.parts
        # A sampler divides the samples among ranks. Its number of ranks is compared with the mesh.
        ranks = parts.group.named_ranks
        mesh = ranks if isinstance(ranks, MeshRanks) else None
        sessions = ReaderSessions(parts.sessions, ReaderIdentity(parts.job))
        tables = tables_beside(parts)
        return IndexedShards(self.manifest, parts.pipeline, sessions, window, mesh, tables)

    @arguments.checked(
        max_tokens=arguments.whole(1, MAX_TOKENS),
        length=arguments.FUNCTION.or_none(),
        tokens=arguments.FUNCTION.or_none(),
        window=arguments.whole(2, arguments.MAX_BATCH),
        per_source=arguments.flag(),
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
        per_source: bool = False,
        on_error: Handler | str = reraise,
        timeout_s: float = 300.0,
    ) -> ShardReader[Block[T_co]]:
        """Return a dataset of blocks of whole samples: training without padding::

            dataset = ShardDataset(urls, shuffle=True, decode={"npy": "numpy"})
            blocks = dataset.pack(8_192, tokens=lambda sample: sample["npy"])
            for block in blocks.loader(num_workers=4):
                block["tokens"], block["positions"], block["cu_seqlens"], block["max_seqlen"]

        Blocks have at most `max_tokens` tokens. Among `window` samples, those that fit best are put
        together: no sample is cut, and each comes once. A `Block` has its samples, with their keys
        and sources, and the arrays that attention within samples takes. With `length`, the training
        loop concatenates the samples; with `tokens`, the block has the concatenated tokens.

        Every rank gets the same number of blocks. Ranks with short samples get ahead of others;
        near the end of an epoch, their blocks are less full. A rank that has given all of its
        samples repeats the last sample in each block that other ranks still need. Samples that are
        `window` or more places apart keep their order.

        The new dataset has separate epochs and states. If the numbers of ranks and workers are the
        same, a run resumes with exactly the next block. If they differ, it resumes with exactly the
        samples that are left, for which it needs the states of all ranks.

        Args:
            max_tokens: maximum number of tokens in a block.
            length: returns the number of tokens of a sample, always the same for the same sample.
            tokens: in place of `length`, returns the tokens themselves: a tensor or array of one
                dimension. The function is called in the process that packs; with `loader()`, that
                is the process of the training loop, so tokenize in `map`.
            window: number of samples that are kept in memory; by each worker, if a plain DataLoader
                reads the blocks. With a larger window, blocks of long samples are fuller.
            per_source: in a mixture, make each block of samples of one source, which the block
                names as its `source`, instead of samples of all sources in the mixture's
                proportions. Sources come in proportion to their tokens. The samples of all sources
                share the window, so set `window` to 512 times the number of sources.
            on_error: called with the SampleError of a sample that is longer than `max_tokens`, has
                no tokens, or whose length is not a whole number. See `handlers`.
            timeout_s: how long a rank waits for the others to fill their windows.

        Raises:
            ConfigError: an argument is invalid, numpy is missing, or the dataset has
                `global_batch_size`, or yields groups of samples already; or, when iterating, the
                ranks share no key-value store over which to agree, or a rank has no samples at all.
            RankTimeoutError, RanksError: a rank does not answer.
        """
        self._check_can_pack(length, tokens)
        group = self.parts.group
        agreement = group.agreements(f"blocks/{max_tokens}/{window}/{per_source}", timeout_s)
        stage = Pack(
            max_tokens=max_tokens,
            window=window,
            length=length,
            tokens=tokens,
            on_error=handler_of(on_error),
            block_of=self._runtime.block_of,
            agreement=agreement,
            per_source=per_source,
        )
        return cast("ShardReader[Block[T_co]]", self.regrouped(stage))

    def regrouped(self, stage: Stage) -> Self:
        """Return a dataset of the groups that a stage makes of the samples.

        The new dataset has separate epochs and states.

        Raises ConfigError if this dataset has a stage already.
        """
        self._check_yields_samples("pack() or batch_by_length()")
        return self._derived(stage=stage)

    # For `Selecting`

    def _rows_of_tables(self) -> Iterator[tuple[str, Row]]:
        """Return the rows of the dataset's tables of samples, with the url of each row's table."""
        return table_rows(self.parts)

    def _selected(self, choices: Choices) -> Self:
        """Return a dataset of the chosen samples."""
        self._check_yields_samples("choosing some of them")
        derived = self._derived(samples=self.parts.samples.selected(choices))
        # States that were loaded belong to the dataset from which this selection is made.
        derived.epoch_reader.bookmark.forget_states()
        return derived

    # Checks and copies

    def _check_can_pack(self, length: object, tokens: object) -> None:
        """Raise ConfigError if the samples cannot be packed.

        Also raises it unless exactly one of `length` and `tokens` is given.
        """
        has_one_function = (length is None) != (tokens is None)
        if not has_one_function:
            raise ConfigError(
                "pack() needs the lengths of samples",
                remedy="give it length=, a function that returns one; or tokens=, one that returns "
                "the tokens",
            )
        if self.parts.has_global_batches:
            raise ConfigError(
                "the dataset has global_batch_size, and blocks have different numbers of samples",
                remedy="omit global_batch_size",
            )
        try:
            import numpy  # noqa: F401
        except ImportError as exn:
            raise ConfigError("blocks of samples need numpy", remedy="pip install numpy") from exn

    def _check_yields_samples(self, what: str) -> None:
        """Raise ConfigError if a stage groups the samples.

        Args:
            what: the call, for the message: it has to come before the grouping.
        """
        if self.parts.stage is not None:
            raise ConfigError(
                f"{what} is for samples, and this dataset yields groups of them",
                remedy="write it before pack(); what is made of a block belongs in "
                "loader(collate_fn=...)",
            )

    def _derived(self, **changes: Any) -> Self:
        """Return a dataset with some other parts and a separate position.

        Args:
            changes: the parts that differ, by their names in `DatasetParts`.
        """
        derived = copy(self)
        derived.epoch_reader = self.epoch_reader.derived(**changes)
        return derived

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        # `ShardDataset[Sample](...)` sets this attribute to a type that may not be importable.
        state.pop("__orig_class__", None)
        return state


def _handover(zero_copy: bool | str | Collection[str]) -> Handover | None:
    """Return the handover that the argument describes; None if all members are copied."""
    if not zero_copy:
        return None
    from shardcache_client.sharing.handover import Handover  # imported here, as it needs numpy

    return Handover.of(zero_copy)
