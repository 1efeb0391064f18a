"""`ShardDataset`: tar shards as a PyTorch dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map  # torch's documented extension point

from shardcache.errors import ConfigError
from shardcache.protocol import from_here, socket_path
from shardcache_client.callers import batch_size_of_loader_asking_length, batching_of, stateful_loader_asks
from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.session import Patience
from shardcache_client.daemon.sessions import Fallback, Sessions, resolver
from shardcache_client.handlers import Handler, reraise
from shardcache_client.malloc import keep_freed_memory
from shardcache_client.order.deal import Assignment, Deal, SampleDeal, check
from shardcache_client.order.partition import Cut, Even, taken_in_turns
from shardcache_client.order.rounds import Shuffle
from shardcache_client.order.state import Place, Resumption, State, resume
from shardcache_client.ranks.membership import Membership, in_worker
from shardcache_client.ranks.one_epoch import OneEpoch
from shardcache_client.ranks.one_manifest import OneManifest
from shardcache_client.ranks.resharding import refuse_resharding
from shardcache_client.reading.position import ReaderPosition
from shardcache_client.reading.stream import Decode, EpochStream, Source
from shardcache_client.sharing.bookmark import Bookmark, Loader
from shardcache_client.sharing.shared_state import SharedState
from shardcache_client.topology import Topology, explicit_ranks, job_name

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")

_PATIENCE_S = 120.0  # for ranks that stay in an epoch; well below the 10-minute timeout of NCCL's collectives


class ShardDataset(IterableDataset[Any]):
    """A PyTorch dataset of tar shards, read from the disk cache that the node's shardcache daemon fills.

    Yields dicts: `__key__` and `__url__` (str), and the bytes of each member under its extension. An epoch is one
    sequence of samples, determined by manifest, seed and epoch number; ranks and their DataLoader workers take equal
    spans of it, to the sample, whatever the number of shards.

    Without `set_epoch`, each iteration reads the next epoch; docs/semantics.md covers ranks that end one early. The
    current epoch and a loaded state are shared by one trainer process and the DataLoader workers that it starts.

    Args:
        urls: a brace pattern, glob, prefix ending in "/", index file (.json, wids format), local path, or a list of
            these.
        shuffle: read shards and samples in a different order each epoch, determined by `seed` and the epoch alone.
        shuffle_window: number of shards whose samples are mixed; a reader holds that many shards, and no shuffle
            buffer. 0: only the order of the shards changes; samples come in file order.
        seed: seed of the shuffle; must be the same on all ranks.
        canonical_nodes: split the shards into this many fixed groups and shuffle within each group, so that on this
            many nodes each mostly reads shards that it has already cached. 1: shuffle all shards together.
        even: "pad": every rank gets the same number of samples, and at most world_size - 1 samples come twice; "drop":
            the same number, and at most world_size - 1 are left out; None: every sample once, so some ranks get one
            more.
        samples_per_epoch: samples per epoch over all ranks; the next epoch continues after them. Default: the whole
            dataset.
        epochs: number of epochs in the training run; epochs are numbered from 0, so the last is `epochs - 1`. Nothing
            is prefetched past it; later epochs can still be read, without prefetching from one to the next. Default:
            no limit.
        batch_size: the DataLoader's batch size. Each worker then reads whole batches, so a rank has at most one short
            batch and `len(loader)` is right; if it differs, `len(loader)` is unknown with several workers.
        decode: called with each sample; its return value is yielded. An exception it raises becomes a DecodeError.
        on_error: called with the error of a shard or sample; returns True to skip it, False to end the epoch there, or
            raises. See `handlers`. Unless `even` is None, skipped samples are replaced at the end of the epoch by
            samples of other readers: ranks with unequal numbers would wait for each other indefinitely.
        job: name of this job in `shardcache status`. Default: the name from Slurm, torchrun or Ray, or the script's.
        socket: path of the daemon's socket. Default: the same as for `shardcache serve`.
        rank, world_size: of this process. Default: from torch.distributed if it is initialised, else from torchrun's or
            Slurm's variables, else a single process. Determined when iteration begins.
        timeout_s: how long to wait for a shard, or for a lost daemon to come back.
        partial_reads: if the reader has to wait for a shard, yield its samples as they arrive, as soon as their bytes
            are checked; for uncompressed tars read in file order. If the rest of the shard then fails, the error names
            the samples already yielded, and its `yielded` is their number. False: yield nothing until the whole shard
            has passed every check.
        fallback: what to do if there is no daemon or its disk fails. "error": raise. "direct": read from the object
            store, with this process's own credentials, until the daemon works again. Needs `shardcache[daemon]`; see
            docs/fallback.md.
        zero_copy: yield members of 4 KiB and more as read-only arrays (`buffers.Buffer`) over the mapped shard instead
            of bytes; they convert and compare like bytes, and pass from a DataLoader worker to the training process
            without a copy. True: all such members; one extension or several: only those, all others are bytes.
            `json.loads` accepts only bytes: omit that extension, or pass `bytes(value)`. Needs numpy; turns partial
            reads off.

    Attributes:
        seed: as given.
        manifest: the shards in the order of `urls`, with sizes and sample counts where known. Rank 0's manifest if
            torch.distributed was initialised first; otherwise the ranks compare theirs when reading begins.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be used.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: `urls` cannot be resolved.
        ConfigError: an argument is invalid; or, at the first sample, a wrapper shards the samples a second time.
        ManifestMismatchError, RanksError: another rank sees different shards, or does not answer.
        EpochMismatchError: this rank repeatedly ends an epoch early while other ranks continue it.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        shuffle: bool = False,
        shuffle_window: int = 8,
        seed: int = 0,
        canonical_nodes: int = 1,
        even: Even = "pad",
        samples_per_epoch: int | None = None,
        epochs: int | None = None,
        batch_size: int = 1,
        decode: Decode | None = None,
        on_error: Handler = reraise,
        job: str | None = None,
        socket: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout_s: float = 300.0,
        partial_reads: bool = True,
        fallback: Fallback = "error",
        zero_copy: bool | str | Collection[str] = False,
    ) -> None:
        _check_least(0, shuffle_window=shuffle_window)
        counts = {"samples_per_epoch": samples_per_epoch, "epochs": epochs}
        _check_least(1, canonical_nodes=canonical_nodes, batch_size=batch_size, **counts)
        if even not in ("pad", "drop", None):
            raise ConfigError(f"even is {even!r}", remedy='choose "pad", "drop" or None')
        if fallback not in ("error", "direct"):
            raise ConfigError(f"fallback is {fallback!r}", remedy='choose "error" or "direct"')
        self.seed = seed
        self._on_error = on_error
        self._job = job or job_name()
        named_ranks = explicit_ranks(rank, world_size)
        self._membership = Membership(named_ranks)
        self._reading: tuple[int, EpochStream] | None = None
        where = socket_path(socket)
        patterns = [from_here(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)]
        self._agreed = OneManifest(patterns, named_ranks, timeout_s)
        resolve = resolver(fallback)
        self.manifest = self._agreed.settle(lambda: resolve(where, Reader(self._job), patterns, timeout_s))
        shuffling = Shuffle(seed, shuffle_window, canonical_nodes) if shuffle else None
        self._dealing = Assignment(shuffling, even, batch_size, samples_per_epoch)
        self._source = Source(
            sessions=Sessions(
                where, Patience(timeout_s), partial_reads=bool(partial_reads and not zero_copy), fallback=fallback
            ),
            manifest=self.manifest,
            deal=self._dealing.deal(self.manifest),
            decode=decode,
            handover=_handover(zero_copy) if zero_copy else None,
            epochs=epochs,
        )
        self._shared_state = SharedState(in_worker=in_worker)
        self._one_epoch = OneEpoch(self._agreed.name, self._agreed.place, min(timeout_s, _PATIENCE_S))
        self._bookmark = Bookmark(self._shared_state, self._dealing.identities(self.manifest))

    def __repr__(self) -> str:
        return f"ShardDataset({self.manifest!r}, epoch={self.epoch}, job={self._job!r})"

    def __len__(self) -> int:
        """Return the number of samples that this rank reads per epoch.

        Raises TypeError, as Python expects of `__len__`, while the number is unknown, and if a loader with several
        workers and a different batch_size asks, since its own length would be wrong.
        """
        size = self._dealing.batch_size
        loaders_size = batch_size_of_loader_asking_length(self)
        if loaders_size and size % loaders_size:
            raise TypeError(
                f"len() of the loader is not known: its batch_size is {loaders_size}, the dataset's {size}, and each "
                f"worker may have a short batch; pass batch_size={loaders_size} to the dataset as well"
            )
        samples = self._deal().rank_size(self.topology())
        if samples is None:
            raise TypeError(f"the number of samples is not known: {self._why_not_counted()}")
        return samples

    def __iter__(self) -> Iterator[Any]:
        loader = _loader()
        if loader is not None:
            keep_freed_memory()
        if self._source.handover is not None:
            _let_collate_pass_buffers()
            if loader is None:
                self._source.handover.acks.receive_here()
        self._refuse_resharding()
        topology = self.topology()
        deal = self._deal()
        check(deal, topology, self._dealing.even)
        self._agreed.compare(self.manifest, topology, counted=deal.counted)
        epoch = self._bookmark.begin(loader, self._agree_on_epoch)
        stream = self._stream_of(epoch, topology, self._bookmark.states)
        self._reading = os.getpid(), stream
        self._explain(topology)
        return stream.samples(self._look_at_callers, partial(self._bookmark.finish, epoch, loader))

    @property
    def _stream(self) -> EpochStream | None:
        """The stream that this process reads; None in a process forked after the stream began."""
        return self._reading[1] if self._reading is not None and self._reading[0] == os.getpid() else None

    def _look_at_callers(self) -> None:
        self._refuse_resharding()  # a wrapper around the iterator is on the stack only from the first sample on
        found = batching_of(self)
        self._bookmark.note_batching(None if found is None else (found.batch_size, found.drop_last))

    def _agree_on_epoch(self, epoch: int, left: int | None) -> int:
        # With even=None, ranks need not be in step: each one counts for itself.
        return epoch if self._dealing.even is None else self._one_epoch.agree(self._membership.ranks, epoch, left)

    def _stream_of(self, epoch: int, topology: Topology, states: Sequence[State]) -> EpochStream:
        source, start = replace(self._source, deal=self._deal()), Resumption(epoch)
        if states and states[0].epoch == epoch:
            if states[0].counted != source.deal.counted:
                source = replace(source, deal=self._dealing.deal(self.manifest, counted=states[0].counted))
            start = resume(states, self._cut(topology), topology, source.deal.epoch_samples)
        reader = Reader(self._job, topology, _loader_name(), self._dealing.batch_size)
        return EpochStream(source, reader, start, ReaderPosition.at(start.place, self._on_error))

    def _deal(self) -> Deal:
        """Return the deal of this dataset; by sample counts only if all ranks are sure to have the same counts."""
        deal, ranks = self._source.deal, self._membership.ranks
        if not deal.counted or self._dealing.needs_counts or ranks.world_size == 1:
            return deal
        shared = self._agreed.settled or self.manifest.counts_listed
        return deal if shared else self._dealing.deal(self.manifest, counted=False)

    def _why_not_counted(self) -> str:
        uncounted, shards = self.manifest.uncounted, len(self.manifest)
        known = "this node has counted the samples, but other ranks' nodes may not have"
        return (
            f"{f'{uncounted} of {shards} shards were never counted' if uncounted else known}. "
            "Count them once with `shardcache index URL... -o index.json`, then use index.json as the url"
            + ("" if uncounted else "; or initialise torch.distributed before creating the dataset")
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

    @property
    def epoch(self) -> int:
        """The epoch that this process is reading, or else the next one that it would read."""
        return self._bookmark.next_epoch if self._stream is None else self._stream.start.epoch

    @property
    def position(self) -> int:
        """Number of samples of its share that this reader has passed, bad ones included."""
        return 0 if self._stream is None else self._stream.reader_position.taken

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that every iteration reads from now on, including those in running DataLoader workers."""
        self._refuse_resharding()  # a wrapper that sends one process's batches to all never reads on the others
        self._bookmark.set_epoch(epoch)
        self._reading = None

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return this reader's position: a few numbers, whatever the size of dataset and batches.

        In the process that reads the samples, the position follows the last sample taken from the iterator; this is how
        a StatefulDataLoader asks its workers. Workers of a plain DataLoader run ahead of the training loop, so the loop
        passes the number of `batches` that it has taken. Skipped samples are then unknown and come up again, and the
        first batch comes from worker 0, whichever worker's turn it was.

        A state taken after an epoch's last batch resumes with the next epoch, unless other ranks have one batch more or
        fewer (`even=None`): then load their states along with it.

        Args:
            batches: number taken from the loader since the iteration began. The dataset's batch_size must be the
                loader's.

        Raises ConfigError if the position cannot be determined, for example with a loader of another batch_size.
        """
        topology = self.topology()
        if batches is not None:
            return self._state_of_rank(topology, batches)
        if not in_worker() and self._bookmark.workers:
            raise ConfigError(
                "the samples are read by the loader's workers, which run ahead of the training loop",
                remedy="use torchdata's StatefulDataLoader and its state_dict(); or call state_dict(batches=...) with "
                "the number of batches taken since the iteration began",
            )
        stream = self._stream or self._stream_of(self.epoch, topology, self._bookmark.states)
        own_loop = not in_worker() and not stateful_loader_asks()
        over = own_loop and self._is_over(stream) and self._ranks_end_together(stream, topology)
        return self._state(stream, topology, stream.reader_position.place, over=over).to_json()

    def _is_over(self, stream: EpochStream) -> bool:
        """Return True if the epoch has no more batches, but for a short one that the loader drops."""
        size, drop_last = self._bookmark.batching or (1, False)
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
        self._bookmark.load(state, worker=in_worker())
        self._reading = None

    def _state_of_rank(self, topology: Topology, batches: int) -> dict[str, Any]:
        """Return the states of all workers of this rank after `batches` batches were taken from them in turn."""
        _check_least(0, batches=batches)
        bookmark = self._bookmark
        states = bookmark.states_of_workers if bookmark.workers else bookmark.states
        workers = max(1, bookmark.workers)
        crew = [Topology(topology.rank, topology.world_size, worker, workers) for worker in range(workers)]
        streams = [self._stream_of(bookmark.epoch_begun, reader, states) for reader in crew]
        if not streams[0].counted:
            raise ConfigError(
                "batches=... does not determine a position: the samples of the shards are not counted",
                remedy="count them: shardcache index URL... -o index.json; or use torchdata's StatefulDataLoader",
            )
        size = self._dealing.batch_size
        loaders_size, drop_last = bookmark.batching or (size, False)
        if batches and loaders_size != size:
            raise ConfigError(
                f"batches=... does not determine a position: the loader's batch_size is {loaders_size}, "
                f"the dataset's {size}",
                remedy=f"set the same for both: ShardDataset(..., batch_size={loaders_size})"
                + ("; batches=... is then a number of samples" if loaders_size == 1 else ""),
            )
        left = [stream.samples_left // size * size if drop_last else stream.samples_left for stream in streams]
        taken = taken_in_turns(left, size, batches)
        over = taken == left and self._ranks_end_together(streams[0], crew[0])
        places = [stream.reader_position.place.after(count) for stream, count in zip(streams, taken, strict=True)]
        each = zip(streams, crew, places, strict=True)
        return {"workers": [self._state(*reader, over=over).to_json() for reader in each]}

    def _ranks_end_together(self, stream: EpochStream, reader: Topology) -> bool:
        """Return True if the epoch ends after the same number of batches on all ranks."""
        if reader.world_size == 1:
            return True
        deal, drop_last = stream.deal, (self._bookmark.batching or (1, False))[1]
        return isinstance(deal, SampleDeal) and deal.ends_together(
            self._cut(reader), stream.start.phases, drop_last=drop_last
        )

    def _state(self, stream: EpochStream, reader: Topology, place: Place, *, over: bool) -> State:
        """Return a reader's state; at the end of an epoch, samples that the loader drops count as taken."""
        if over and stream.counted:
            place = stream.reader_position.place.after(stream.samples_left)
        return State(
            dataset=self._bookmark.datasets[stream.counted],
            epoch=stream.start.epoch,
            cut=self._cut(reader),
            counted=stream.counted,
            phases=stream.start.phases,
            reader=reader.reader,
            place=place,
            over=over,
        )

    # Ranks and workers

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return self._membership.topology()

    def _cut(self, topology: Topology) -> Cut:
        return Cut.of(topology, self._dealing.even, self._dealing.batch_size)

    def _refuse_resharding(self) -> None:
        refuse_resharding(self.topology(), self._membership.ranks_of_job.world_size)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_resharding()  # a spawned worker cannot see wrappers around its parent's loader
        return self.__dict__ | {"_reading": None}


def _loader() -> Loader | None:
    """Return this process's place among the workers of a DataLoader; None if it is not a worker."""
    info = get_worker_info()
    return None if info is None else Loader(info.seed - info.id, info.id, info.num_workers)


def _loader_name() -> str:
    """Return a name for the loader that is unique on this node; empty in a process that is not a loader's worker.

    Seeds alone may be the same in two runs, and process ids in two containers.
    """
    loader = _loader()
    return "" if loader is None else f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getppid()}-{loader.number}"  # noqa: PTH116


def _handover(zero_copy: bool | str | Collection[str]) -> Handover:
    from shardcache_client.sharing.handover import Handover  # needs numpy

    if isinstance(zero_copy, bool):
        return Handover()
    extensions = [zero_copy] if isinstance(zero_copy, str) else zero_copy
    if any(extension.startswith(".") for extension in extensions):
        raise ConfigError(f"zero_copy is {zero_copy!r}", remedy='write extensions without a dot: "jpg", not ".jpg"')
    return Handover(frozenset(extension.lower() for extension in extensions))


def _let_collate_pass_buffers() -> None:
    """Have `default_collate` gather Buffers in a list in this process, as it does with bytes."""
    from shardcache_client.files.buffers import Buffer, pass_on

    default_collate_fn_map[Buffer] = pass_on


def _check_least(least: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ConfigError(f"{name} is {number}", remedy=f"give {least} or more")
