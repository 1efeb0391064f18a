"""`ShardReader`: the samples of tar shards as an iterable that needs no torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, cast

from shardcache.errors import ConfigError
from shardcache.protocol import patterns_from_here
from shardcache.tarindex import Row
from shardcache_client.arguments import (
    DAEMONS,
    FUNCTION,
    NAMES,
    OTHER_WORDS,
    PATH,
    SECONDS,
    TEXT,
    URLS,
    Accepts,
    check_global_batches,
    checked,
    flag,
    instance,
    one_of,
    whole,
)
from shardcache_client.daemon.choice import DaemonChoice, Fallback, Patience, Which
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import SessionPool, resolve
from shardcache_client.decoding.decoders import Spec
from shardcache_client.decoding.pipeline import Missing, Pipeline
from shardcache_client.files.blocks import TokenBlocks
from shardcache_client.files.slicing import Sample
from shardcache_client.handlers import ANY_HANDLER, Handler, handler_of, reraise
from shardcache_client.indexed import IndexedShards, Selecting, row_of, tables_of
from shardcache_client.order.deal import Assignment, Deal, ElasticDeal, check
from shardcache_client.order.manifest import Choices, Manifest
from shardcache_client.order.rounds import Shuffle
from shardcache_client.position.bookmark import Bookmark, Iteration
from shardcache_client.position.partition import Even, Partition
from shardcache_client.position.state import (
    Place,
    ReaderState,
    Resumption,
    batches_before,
    find_states,
    in_batches,
    is_read,
    resume,
    resume_batches,
)
from shardcache_client.ranks.group import RankGroup
from shardcache_client.ranks.mesh import MeshRanks, given_ranks
from shardcache_client.reading.stream import EpochStream, StreamSettings
from shardcache_client.sharing.shared_state import SharedState
from shardcache_client.topology import Ranks, Topology, job_name
from shardcache_client.typed import T_co, U

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")


def _zero_copy(value: Any) -> Any:
    return value if isinstance(value, bool | str) else NAMES.converted(value)


def _decode(value: Any) -> Any:
    is_table = isinstance(value, Mapping) and NAMES.converted(value)
    return value if is_table or isinstance(value, str) else FUNCTION.converted(value)


def _missing(value: Any) -> Any:
    return value if isinstance(value, Mapping) else one_of("error", "skip").converted(value)


ARGUMENTS = {
    "urls": URLS,
    "shuffle": flag("; shuffle_window is the number of shards whose samples are mixed"),
    "shuffle_window": whole(0),
    "seed": whole().or_none("None, for a random one"),
    "canonical_nodes": whole(1),
    "even": one_of("pad", "drop", None),
    "samples_per_epoch": whole(1).or_none(),
    "epochs": whole(1).or_none(),
    "batch_size": whole(1),
    "global_batch_size": whole(1).or_none(),
    "tokens": instance("TokenBlocks(length)", TokenBlocks).or_none(),
    "decode": Accepts(
        'the name of an image decoder, a table such as {"jpg": "rgb8"}, or a function', _decode
    ).or_none(),
    "members": NAMES.or_none("None for all"),
    "missing": Accepts('"error", "skip", or a dict of default values', _missing),
    "on_error": Accepts(ANY_HANDLER, handler_of),
    "job": TEXT.or_none(),
    "socket": PATH.or_none(),
    "rank": whole(0).or_none(),
    "world_size": whole(1).or_none(),
    "mesh": Accepts(
        'the DeviceMesh itself, such as mesh["dp"], or a ProcessGroup that this process belongs to', MeshRanks.of
    ).or_none(),
    "timeout_s": SECONDS,
    "partial_reads": flag(),
    "daemon": DAEMONS,
    "fallback": one_of("error", "private"),
    "zero_copy": Accepts("True, False, or extensions of members", _zero_copy),
}


class ShardReader(Selecting, Generic[T_co]):
    """An iterable over the samples of tar shards, read from the disk cache that the node's shardcache daemon fills.

    For training without torch: each process of the job makes one, with its rank and the number of processes, and gets
    its share of the samples. `ShardDataset` adds what torch has: DataLoader workers, and ranks that compare notes.

        reader = ShardReader(urls, shuffle=True, rank=jax.process_index(), world_size=jax.process_count())

    Samples, order, epochs and states are those of `ShardDataset`, which describes the arguments; a state of one can be
    loaded into the other. Ranks without torch.distributed share nothing: if they see different shards, or end an epoch
    early on some ranks alone, nobody notices. Use the same index file on all ranks, and `set_epoch`. docs/frameworks.md
    has recipes for JAX, tf.data and others, with batches that are read ahead.

    Raises the errors of `ShardDataset`.
    """

    @checked(OTHER_WORDS, **ARGUMENTS)
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
            check_global_batches(global_batch_size, batch_size=batch_size, even=even, canonical_nodes=canonical_nodes)
        if tokens is not None and zero_copy:
            raise ConfigError("zero_copy has no meaning for blocks of tokens, which are arrays", remedy="omit it")
        choice = DaemonChoice.of(socket, daemon, fallback)
        patterns = patterns_from_here(urls)
        self._urls = patterns
        self._group = self._ranks_of(given_ranks(mesh, rank, world_size), patterns, timeout_s)
        self._refuse_resharding()
        job = job or job_name()

        def manifest_of_samples() -> Manifest:
            found = resolve(choice, ReaderIdentity(job), patterns, timeout_s)
            return found if tokens is None else found.of_blocks(tokens.count)

        manifest = self._group.settle(manifest_of_samples)
        self._seeds: Mapping[str, int] = {}
        if seed is None:
            self._seeds = {"": (seed := self._drawn_seed())}
        shuffling = Shuffle(seed, shuffle_window, canonical_nodes) if shuffle else None
        dealing = Assignment(
            shuffling,
            even,
            batch_size,
            samples_per_epoch,
            global_batch_size,
            spans=canonical_nodes,
            unit="" if tokens is None else repr(tokens),
        )
        partial_reads = bool(partial_reads and not zero_copy and tokens is None)
        settings = StreamSettings(
            sessions=SessionPool(choice, Patience(timeout_s), partial_reads=partial_reads),
            manifest=manifest,
            deal=dealing.deal(manifest),
            pipeline=Pipeline.of(decode, members, missing, tokens),
            handover=_handover(zero_copy),
            epochs=epochs,
        )
        self._assemble(settings, dealing, seed, handler_of(on_error), job)

    def _drawn_seed(self) -> int:
        seed = self._group.draw_seed()
        if not self._group.ranks.rank:
            log.warning("seed=None: the seed is %d; states keep it, and seed=%d gives the same order again", seed, seed)
        return seed

    def _assemble(self, settings: StreamSettings, dealing: Assignment, seed: int, on_error: Handler, job: str) -> None:
        """Set what an iteration needs, besides the ranks."""
        self.seed = seed
        self.manifest = settings.manifest
        self._on_error = on_error
        self._batching: tuple[int, bool] | None = None  # batch size and drop_last of the loader, if it is known
        self._job = job
        self._dealing = dealing
        self._settings = settings
        self._shared_state = self._new_shared_state()
        self._bookmark = Bookmark(self._shared_state, dealing.identities(settings.manifest))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.manifest!r}, epoch={self.epoch}, job={self._job!r})"

    def _ranks_of(self, given: Ranks | MeshRanks | None, urls: Sequence[str], timeout_s: float) -> RankGroup:
        return RankGroup(given)

    def _new_shared_state(self) -> SharedState:
        return SharedState()

    def __len__(self) -> int:
        """Return the number of samples that this rank reads per epoch.

        Raises TypeError, as Python expects of `__len__`, while the number is unknown.
        """
        samples = self._deal().rank_size(self.topology())
        if self._settings.pipeline.filters:
            raise TypeError("the number of samples is not known: it is up to the filter")
        if samples is None:
            raise TypeError(f"the number of samples is not known: {self._why_not_counted()}")
        return samples

    def __iter__(self) -> Iterator[T_co]:
        return self._begin(Iteration())

    if not TYPE_CHECKING:  # to a type checker, there are none

        def __getitem__(self, number: object) -> NoReturn:
            """Raise TypeError: samples come in the order of the epoch. See `indexed`."""
            numbers = f".subset(range({number.start or 0}, {number.stop}))" if isinstance(number, slice) else ""
            raise TypeError(
                f"a {type(self).__name__} has no samples by number; write {numbers or f'.indexed()[{number!r}]'}"
            )

    @checked(function=FUNCTION)
    def map(self, function: Callable[[T_co], U]) -> ShardReader[U]:
        """Return a dataset that yields `function(item)` for each item of this one.

        It has the same shards and order, begins with this one's epoch, and keeps epochs and states of its own. An
        exception of the function becomes a DecodeError, which goes to `on_error`.
        """
        return cast(ShardReader[U], self._derived(pipeline=self._settings.pipeline.then(function)))

    @checked(function=FUNCTION)
    def filter(self, function: Callable[[T_co], object]) -> Self:
        """Return a dataset that yields the items of this one for which `function(item)` is true.

        Its length is unknown, and ranks get different numbers of items: with several ranks, the dataset needs
        `even=None`, and a state of all ranks to resume from. Otherwise as `map`.
        """
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
        yield from _Tables(tables_of(self._urls), decode=row_of, **options)

    def _selected(self, choices: Choices) -> Self:
        manifest = self.manifest.select(choices)
        if not manifest.samples:
            raise ConfigError("no sample is selected", remedy="select at least one")
        derived = self._derived(manifest=manifest, deal=self._dealing.deal(manifest))
        derived.manifest = manifest
        with derived._shared_state.edit() as notes:
            notes.pop("loaded", None)  # states to resume from are of the dataset that this one is selected from
        derived._bookmark = Bookmark(derived._shared_state, self._dealing.identities(manifest))
        return derived

    @checked(window=whole(1))
    def indexed(self, window: int = 4) -> IndexedShards[T_co]:
        """Return the same samples as a map-style dataset: by number, in the order of `urls`, whatever `shuffle` says.

        Args:
            window: number of shards that each process holds at a time.

        Raises ConfigError if the samples are not counted, or if this dataset leaves samples out.
        """
        mesh = self._group.given if isinstance(self._group.given, MeshRanks) else None
        return IndexedShards(self._settings, ReaderIdentity(self._job), window, mesh)

    def _derived(self, name: str = "", **changes: Any) -> Self:
        """Return a copy with changes to its settings, and epochs and states of its own; `name` as for `of_copy`."""
        derived = copy(self)
        derived._settings = replace(self._settings, **changes)
        derived._group = self._group.of_copy(name)
        derived._shared_state = self._new_shared_state()
        derived._bookmark = Bookmark(derived._shared_state, self._bookmark.datasets)
        derived._bookmark.follow(self._bookmark)
        return derived

    def _begin(self, iteration: Iteration) -> Iterator[Any]:
        """Begin an iteration and return its samples."""
        self._start(iteration)
        samples = self._samples(iteration)
        iteration.read_by(samples)
        return samples

    def _start(self, iteration: Iteration) -> None:
        self._bookmark.begin(iteration, self._follows)
        iteration.place = stream = self.stream(iteration.epoch, iteration.states, iteration.turn)
        if iteration.states and not (stream.counted and stream.samples_left):
            self.count(iteration)  # StatefulDataLoader asks for no sample if it resumes at the end

    def _check(self) -> None:
        """Raise an error if this process may not read."""
        self._refuse_resharding()
        topology = self.topology()
        self._take_seeds(self._shared_state.read().get("seeds", {}))
        deal = self._deal()
        check(deal, topology, self._dealing.even)
        self._check_filters(topology)
        self._group.compare(self.manifest, topology, counted=deal.counted)
        self._group.compare_options(self._dealing.options(), topology)

    def _samples(self, iteration: Iteration) -> Iterator[Any]:
        self._refuse_resharding()  # a wrapper around the iterator is on the stack only from the first sample on
        in_worker = iteration.loader is not None
        if iteration.looks and not in_worker:
            self._start(iteration)  # by now, the iteration that was being read may have ended
        # A DataLoader's workers are two batches ahead, and the first one makes a third as soon as one has been taken.
        ahead = self.batch_size * (1 if not in_worker else 2 if iteration.worker else 3)

        stream: EpochStream = iteration.place
        samples = stream.samples(partial(self.finish, iteration))
        yield from islice(samples, ahead)
        if not in_worker or not stream.read:
            self.count(iteration)
        try:
            yield from samples
        except GeneratorExit:
            self.leave(iteration)
            raise
        iteration.ended = True

    def stream(self, epoch: int, states: Sequence[ReaderState], turn: int) -> EpochStream:
        """Return the stream of this process's share of an epoch, from states if there are any."""
        self._check()
        topology = self.topology()
        if states and states[0].cut.workers == topology.workers:
            topology = topology.turned(turn)
        self._explain(topology)
        return self._stream_of(epoch, topology, states)

    def count(self, iteration: Iteration) -> None:
        """Count an iteration that is more than a look."""
        self._bookmark.count(iteration, self._begun)
        if not iteration.looks:
            self._group.compare_options(self._dealing.batches(), replace(self.topology(), worker=0))

    def leave(self, iteration: Iteration) -> None:
        """Note that an iteration of this process was dropped before its end."""
        counts = iteration.counted and not (iteration.looks or iteration.is_set or iteration.done)
        if counts and self._in_step and not self._in_worker and not sys.is_finalizing():
            self._group.leave(iteration.epoch)

    def finish(self, iteration: Iteration) -> None:
        """Note that all samples of this process's part of an iteration were yielded."""
        if not self._bookmark.finish(iteration):
            return
        if iteration.loader is not None:
            self.count(iteration)
        if not iteration.looks and not iteration.is_set and self._in_step:
            self._group.end(iteration.epoch)

    def _check_filters(self, topology: Topology) -> None:
        if self._settings.pipeline.filters and self._elastic:
            raise ConfigError(
                "a filter would change the global batches of each number of workers in its own way",
                remedy="omit global_batch_size; or filter when shards are written",
            )
        if self._settings.pipeline.filters and topology.world_size > 1 and self._dealing.even is not None:
            raise ConfigError(
                f"a filter gives {topology.world_size} ranks different numbers of samples, and ranks that train "
                "together would wait for each other",
                remedy="pass even=None if ranks may differ, as for inference; else filter when shards are written",
            )

    @property
    def _stream(self) -> EpochStream | None:
        """The stream at whose position this process is; None if it has begun none."""
        current = self._bookmark.current
        return None if current is None else current.place

    @property
    def _in_step(self) -> bool:
        """True if ranks read the same epoch; with even=None, each one counts for itself."""
        return self._dealing.even is not None

    def _follows(self, epoch: int, left: int) -> int:
        return self._group.follows(epoch, left) if self._in_step else epoch

    def _begun(self, epoch: int) -> None:
        if self._in_step:
            self._group.begin(epoch)

    def _stream_of(self, epoch: int, topology: Topology, states: Sequence[ReaderState]) -> EpochStream:
        settings, start = replace(self._settings, deal=self._deal()), Resumption(epoch)
        if states and states[0].epoch == epoch:
            if states[0].counted != settings.deal.counted:
                settings = replace(settings, deal=self._dealing.deal(self.manifest, counted=states[0].counted))
            self._check_states(states)
            if self._elastic:
                start = resume_batches(states, self._cut(topology), topology)
            else:
                start = resume(states, self._cut(topology), topology, settings.deal.epoch_samples)
        reader = ReaderIdentity(self._job, topology, self._loader_name(), self.batch_size)
        return EpochStream(settings, reader, start, self._on_error)

    def _check_states(self, states: Sequence[ReaderState]) -> None:
        """Raise ConfigError if states are missing that others do not determine."""
        if self._settings.pipeline.filters and {state.reader for state in states} != set(range(states[0].cut.readers)):
            raise ConfigError(
                "with a filter, one rank's state does not tell how far the others are",
                remedy="load the states of all ranks",
            )

    def _loader_name(self) -> str:
        """Return a name for the loader that is unique on this node; empty if there is none."""
        return ""

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
            "Count them once with `shardcache index URL... -o index.json`, then use index.json as the url"
        )

    def _explain(self, topology: Topology) -> None:
        """Log once that samples are not counted, and how many workers have nothing to read because of it."""
        if self._deal().counted or topology.reader:
            return
        with self._shared_state.edit() as notes:
            if notes.setdefault("explained", False):
                return
            notes["explained"] = True
        idle = max(0, topology.readers - len(self.manifest))
        log.warning(
            "each worker gets whole shards%s, and len() is not known: %s",
            f" ({idle} of {topology.readers} workers get none)" if idle else "",
            self._why_not_counted(),
        )

    # Epochs and resuming

    def _take_seeds(self, seeds: Mapping[str, int]) -> None:
        """Read in the order of seeds that another run has drawn, if this one has drawn its own."""
        if self._seeds and seeds and self._seeds != seeds:
            self._seeds, self.seed = seeds, seeds.get("", self.seed)
            self._dealing = self._dealing.reseeded(seeds)
            self._settings = replace(self._settings, deal=self._dealing.deal(self.manifest))
            self._bookmark.datasets = self._dealing.identities(self.manifest)

    @property
    def epoch(self) -> int:
        """The epoch that this process is reading, or else the next one that it would read."""
        current = self._bookmark.current
        return self._bookmark.next_epoch if current is None or current.ended else current.epoch

    @property
    def position(self) -> int:
        """Number of samples of its share that this reader has passed, bad ones included."""
        return 0 if self._stream is None else self._stream.position.taken

    @checked(epoch=whole(0))
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on, including those in running DataLoader workers."""
        self._refuse_resharding()  # a wrapper that sends one process's batches to all never reads on the others
        self._bookmark.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample taken: a few numbers, whatever the size of the dataset.

        A state taken after an epoch's last sample resumes with the next epoch, unless other ranks have one sample more
        or fewer (`even=None`): then load their states along with it.
        """
        return self._own_state(alone=True).to_json()

    def _own_state(self, *, alone: bool) -> ReaderState:
        """Return the state of this reader; `alone` if no loader keeps account of the end of the epoch."""
        stream = self._stream or self._stream_of(self.epoch, self.topology(), self._bookmark.next_states()[0])
        return self._state_after(stream, alone=alone)

    def _state_after(self, stream: EpochStream, *, alone: bool) -> ReaderState:
        over = self._is_over(stream) and self._ranks_end_together(stream)
        return replace(self._state(stream, stream.position.place, over=over), over=alone and over)

    def _is_over(self, stream: EpochStream) -> bool:
        """Return True if the epoch has no more batches, but for a short one that the loader drops."""
        size, drop_last = self._batching or (1, False)
        return stream.read or (stream.counted and stream.samples_left < (size if drop_last else 1))

    def load_state_dict(self, state: object) -> None:
        """Resume from a state, exactly where it was taken, at the next iteration of its epoch.

        This is the next iteration, unless `set_epoch` sets another epoch. After a state taken at the end of an epoch,
        the next epoch is read; if `set_epoch` names the finished epoch, the iteration yields nothing.

        The number of ranks and workers may differ from the run that saved the state: the rest of the epoch is divided
        among the new ones. One rank's state with all its workers suffices, since ranks take their batches in step; from
        a list of several ranks' states, each rank's own is used. With `even=None`, ranks differ by a sample: one rank's
        state then suffices until one of its workers reaches the end of its share; after that, an error asks for the
        states of the others.

        Args:
            state: the return value of `state_dict`, or any structure that contains such states, such as a
                StatefulDataLoader's.

        Raises ConfigError if it contains no state, or one of another dataset; the next iteration raises it if the
        positions of all readers cannot be derived.
        """
        if self._seeds:
            self._take_seeds(seeds := find_states(state)[0].seeds)
            with self._shared_state.edit() as notes:
                notes["seeds"] = dict(seeds)
        if self._elastic and not self._in_worker:  # a loader's worker is loaded into by a loader that knows its turn
            state = [each.to_json() for each in in_batches(find_states(state))]
        if not self._loads_of_a_loader and self._is_read(states := find_states(state)):
            state = [replace(each, over=True).to_json() for each in states]
        self._bookmark.load(state, worker=self._in_worker)

    def _is_read(self, states: Sequence[ReaderState]) -> bool:
        """Return True if states of this dataset show that nothing is left of their epoch."""
        first, deal = states[0], self._settings.deal
        if not deal.counted or first.dataset != self._bookmark.datasets.get(True):
            return False
        if isinstance(deal, ElasticDeal):
            return batches_before(first.phases) >= deal.batches
        return deal.epoch_samples is not None and is_read(states, deal.epoch_samples)

    @property
    def _loads_of_a_loader(self) -> bool:
        """True if a state is loaded by a loader that knows itself if an epoch is over."""
        return self._in_worker

    def _ranks_end_together(self, stream: EpochStream) -> bool:
        """Return True if the epoch is known to end after the same number of batches on all ranks."""
        if stream.topology.world_size == 1:
            return True
        deal, cut = stream.deal, self._cut(stream.topology)
        drops = (False, True) if self._batching is None else (self._batching[1],)
        return all(deal.ends_together(cut, stream.start.phases, drop_last=drop_last) for drop_last in drops)

    def _state(self, stream: EpochStream, place: Place, *, over: bool) -> ReaderState:
        """Return a reader's state; at the end of an epoch, samples that the loader drops count as taken."""
        if over and stream.counted:
            place = stream.position.place.after(stream.samples_left)
        return ReaderState(
            dataset=self._bookmark.datasets[stream.counted],
            epoch=stream.start.epoch,
            cut=self._cut(stream.topology),
            counted=stream.counted,
            phases=stream.start.phases,
            reader=stream.topology.reader,
            place=place,
            over=over,
            seeds=self._seeds,
            in_step=over or not self._ends_sooner(stream, place),
        )

    def _ends_sooner(self, stream: EpochStream, place: Place) -> bool:
        """Return True if a reader has no batch left, and others may, as the loader drops short ones or might."""
        size, drop_last = self._batching or (self.batch_size, True)
        left = stream.left_after(place) if drop_last and stream.counted else size
        return left < size and not self._ranks_end_together(stream)

    # Ranks and workers

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return self._group.topology()

    @property
    def _in_worker(self) -> bool:
        """True in a DataLoader worker."""
        return False

    def _cut(self, topology: Topology) -> Partition:
        return Partition.of(topology, self._dealing.even, self._dealing.batch_size_of(topology.world_size))

    @property
    def batch_size(self) -> int:
        """Number of samples in a batch of this rank; with `global_batch_size`, its part of a global batch.

        Raises ConfigError if the number of ranks does not divide `global_batch_size`.
        """
        return self._dealing.batch_size_of(self._group.ranks.world_size)

    @property
    def _elastic(self) -> bool:
        """True if global batches do not depend on the number of ranks and workers."""
        return self._dealing.global_batch_size is not None

    def _refuse_resharding(self) -> None:
        self._group.refuse_resharding()

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_resharding()  # a spawned worker cannot see wrappers around its parent's loader
        state = dict(self.__dict__)
        state.pop("__orig_class__", None)  # set by ShardDataset[Sample](...): a type that may not be importable
        return state


class _Tables(ShardReader[tuple[str, Row]]):
    """A reader of sample tables, all of it by one process: no counts are needed."""

    def _explain(self, topology: Topology) -> None:
        pass


def _handover(zero_copy: bool | str | Collection[str]) -> Handover | None:
    if not zero_copy:
        return None
    from shardcache_client.sharing.handover import Handover  # needs numpy

    return Handover.of(zero_copy)
