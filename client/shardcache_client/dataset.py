"""`ShardDataset`: tar shards as a PyTorch dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map  # torch documents it as what to extend

from shardcache.errors import ConfigError
from shardcache.protocol import from_here, socket_path
from shardcache_client.callers import batch_size_of_loader_asking_length, batching_of, stateful_loader_asks
from shardcache_client.daemon.connection import Reader
from shardcache_client.daemon.session import Patience
from shardcache_client.daemon.sessions import Fallback, Sessions, resolver
from shardcache_client.handlers import Handler, reraise
from shardcache_client.malloc import keep_freed_memory
from shardcache_client.order.deal import Deal, Dealing, SampleDeal, check
from shardcache_client.order.partition import Cut, Even, taken_in_turns
from shardcache_client.order.rounds import Shuffle
from shardcache_client.order.state import Place, Resumption, State, resume
from shardcache_client.ranks.membership import Membership, in_worker
from shardcache_client.ranks.one_epoch import OneEpoch
from shardcache_client.ranks.one_manifest import OneManifest
from shardcache_client.ranks.resharding import refuse_resharding
from shardcache_client.reading.stream import Decode, EpochStream, Source
from shardcache_client.reading.tally import Tally
from shardcache_client.sharing.board import Board
from shardcache_client.sharing.bookmark import Bookmark, Loader
from shardcache_client.topology import Topology, explicit_ranks, job_name

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

log = logging.getLogger("shardcache")

_PATIENCE_S = 120.0  # with ranks that stay in an epoch; well below the 10 minutes of NCCL's collectives


class ShardDataset(IterableDataset[Any]):
    """The samples of tar shards, read from the local disk where this node's daemon keeps them.

    Yields dicts: `__key__` and `__url__` (str), and the bytes of each member by its extension. An epoch is one sequence
    of samples, a function of manifest, seed and epoch; the ranks of the job and the DataLoader workers of each rank
    take equal spans of it, down to single samples, whatever the number of shards.

    Without `set_epoch`, each iteration reads the next epoch; see docs/semantics.md for ranks that leave one early. The
    epoch, and a state that is loaded, belong to one trainer process and the DataLoader workers that it starts.

    Args:
        urls: a brace pattern, glob, prefix ending in "/", index file (.json, wids format), local path, or a list of
            these.
        shuffle: read shards and samples in another order each epoch, a function of `seed` and the epoch alone.
        shuffle_window: mix the samples of so many shards; a reader has that many shards in hand, and no buffer. 0: only
            the order of the shards changes, samples come as they were written.
        seed: must be the same on all ranks.
        canonical_nodes: deal the shards to so many groups once and for all, and shuffle within them, so that each of so
            many nodes mostly meets the shards again that it has cached. 1: shuffle all.
        even: "pad": every rank gets the same number of samples, at most world_size - 1 of them for the second time;
            "drop": as many are left out; None: every sample once, some ranks get one more.
        samples_per_epoch: samples of an epoch, all ranks together; the next one goes on behind them. Default: the whole
            dataset.
        epochs: of the training, numbered from 0: the last is `epochs - 1`. The daemon is then told of none behind that,
            and fetches nothing for it. Reading on works, without anything fetched ahead from one epoch to the next.
            Default: there is always another.
        batch_size: the DataLoader's. Workers then read whole batches, so that only one of a rank's is short and
            `len(loader)` is right; without it, `len(loader)` of several workers is not known.
        decode: called with each sample; what it returns is yielded. An error it raises becomes a DecodeError.
        on_error: called with the error of one shard or sample; returns True to go on without it, False to end the
            epoch here, or raises. See `handlers`. What is left out is made up for at the end by samples that other
            readers read, unless `even` is None: ranks that get unequal numbers wait for each other without end.
        job: the name under which `shardcache status` shows this job. Default: Slurm's, torchrun's or Ray's, or the
            script.
        socket: the daemon's. Default: as in `shardcache serve`.
        rank, world_size: of this process. Default: torch.distributed's where it is initialised, else torchrun's or
            Slurm's variables, else a single process. Found out when iteration begins.
        timeout_s: how long to wait for one shard, or for a daemon that went away to come back.
        partial_reads: give samples of a plain tar that is waited for as their bytes arrive and are checked, where they
            are read as they were written. Should the rest of such a shard fail, its error says which samples had been
            given already, and its `yielded` how many. False: give none before the whole shard has passed every check.
        fallback: what to do without the daemon, or when its disk is bad. "error": raise. "direct": read straight from
            the store meanwhile, with this process's own credentials. Needs `shardcache[daemon]`; see docs/fallback.md.
        zero_copy: members of 4 KiB and more are read-only arrays (`buffers.Buffer`) over the mapped shard in place of
            bytes; they convert and compare as bytes do, and reach the training process from a DataLoader worker without
            being copied. True: all such members; an extension, or several: only those, and all others are bytes.
            `json.loads` takes only bytes: leave its extension out, or give it `bytes(value)`. Needs numpy; no partial
            reads.

    Attributes:
        seed: as given.
        manifest: the shards, in the order of `urls`, with sizes and sample counts as far as they are known. Rank 0's,
            where torch.distributed was initialised before; else the ranks' are compared when reading begins.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be talked to.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: what the store says about `urls`.
        ConfigError: an argument makes no sense; or, with the first sample, a wrapper shards the samples a second time.
        ManifestMismatchError, RanksError: another rank sees other shards, or does not answer.
        EpochMismatchError: this rank leaves epochs in which the others stay.
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
        self._dealing = Dealing(shuffling, even, batch_size, samples_per_epoch)
        self._source = Source(
            sessions=Sessions(
                where, Patience(timeout_s), partial_reads=partial_reads and not zero_copy, fallback=fallback
            ),
            manifest=self.manifest,
            deal=self._dealing.deal(self.manifest),
            decode=decode,
            handover=_handover(zero_copy) if zero_copy else None,
            epochs=epochs,
        )
        self._board = Board(in_worker=in_worker)
        self._one_epoch = OneEpoch(self._agreed.name, self._agreed.place, min(timeout_s, _PATIENCE_S))
        self._bookmark = Bookmark(self._board, self._dealing.identities(self.manifest))

    def __repr__(self) -> str:
        return f"ShardDataset({self.manifest!r}, epoch={self.epoch}, job={self._job!r})"

    def __len__(self) -> int:
        """Return how many samples this rank reads in an epoch.

        Raises TypeError, as Python's protocols want it, while that is not known; also to a loader of several workers
        that has another batch_size, whose own length would be wrong.
        """
        size = self._dealing.batch_size
        loaders_size = batch_size_of_loader_asking_length(self)
        if loaders_size and size % loaders_size:
            raise TypeError(
                f"len() of the loader is not known: its batch_size is {loaders_size}, the dataset's {size}, and each "
                f"worker may have a short batch; give the dataset batch_size={loaders_size}, too"
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
                self._source.handover.receipts.receive_here()
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
        """The stream that this process reads; None in one that was forked since it began."""
        return self._reading[1] if self._reading is not None and self._reading[0] == os.getpid() else None

    def _look_at_callers(self) -> None:
        self._refuse_resharding()  # a wrapper that was handed the iterator is on the stack from here on
        found = batching_of(self)
        self._bookmark.note_batching(None if found is None else (found.batch_size, found.drop_last))

    def _agree_on_epoch(self, epoch: int, left: int | None) -> int:
        # With even=None ranks need not be in step, and each goes by its own count.
        return epoch if self._dealing.even is None else self._one_epoch.agree(self._membership.ranks, epoch, left)

    def _stream_of(self, epoch: int, topology: Topology, states: Sequence[State]) -> EpochStream:
        source, start = replace(self._source, deal=self._deal()), Resumption(epoch)
        if states and states[0].epoch == epoch:
            if states[0].counted != source.deal.counted:
                source = replace(source, deal=self._dealing.deal(self.manifest, counted=states[0].counted))
            start = resume(states, self._cut(topology), topology, source.deal.epoch_samples)
        reader = Reader(self._job, topology, _loader_name(), self._dealing.batch_size)
        return EpochStream(source, reader, start, Tally.at(start.place, self._on_error))

    def _deal(self) -> Deal:
        """Return how the ranks deal: by sample counts only where all of them are sure to have the same ones."""
        deal, ranks = self._source.deal, self._membership.ranks
        if not deal.counted or self._dealing.needs_counts or ranks.world_size == 1:
            return deal
        shared = self._agreed.settled or self.manifest.counts_listed
        return deal if shared else self._dealing.deal(self.manifest, counted=False)

    def _why_not_counted(self) -> str:
        uncounted, shards = self.manifest.uncounted, len(self.manifest)
        known = "this node has counted the samples, and the other ranks' nodes may not have"
        return (
            f"{f'{uncounted} of {shards} shards were never counted' if uncounted else known}. "
            "`shardcache index URL... -o index.json` counts them once, and index.json is the url then"
            + ("" if uncounted else "; or initialise torch.distributed before the dataset is made")
        )

    def _explain(self, topology: Topology) -> None:
        """Say once what it means that samples are not counted, and who has nothing to read for that."""
        if self._deal().counted or topology.reader:
            return
        with self._board.edit() as notes:
            if notes.setdefault("explained", False):
                return
            notes["explained"] = True
        idle = max(0, topology.readers - len(self.manifest))
        log.warning(
            "whole shards are dealt to the workers%s, and len() is not known: %s",
            f", of which {idle} of {topology.readers} have none" if idle else "",
            self._why_not_counted(),
        )

    # Epochs and resuming

    @property
    def epoch(self) -> int:
        """The epoch that this process reads, or else the one that it would read next."""
        return self._bookmark.next_epoch if self._stream is None else self._stream.start.epoch

    @property
    def position(self) -> int:
        """How many samples of its share this reader has passed, bad ones included."""
        return 0 if self._stream is None else self._stream.tally.taken

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that every iteration reads from now on, in living DataLoader workers, too."""
        self._refuse_resharding()  # a wrapper that gives one process's batches to all asks for none on the others
        self._bookmark.set_epoch(epoch)
        self._reading = None

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """Return where this reader is: a few numbers, whatever the size of dataset and batches.

        Where samples are read in this process, that is behind the last one that was taken from the iterator; so a
        StatefulDataLoader asks its workers. A training loop around a plain DataLoader with workers, which are ahead of
        it, says how many batches it has taken. What was skipped is then not known, and comes up again; and worker 0 has
        the first turn again, whoever's it was.

        The state behind an epoch's last batch is followed by the next epoch, unless other ranks have a batch more or
        fewer (`even=None`): theirs can be loaded with it.

        Args:
            batches: taken from the loader since the iteration began. The dataset must know the loader's batch_size.

        Raises ConfigError where the state cannot be told: by a loader of another batch_size, for one.
        """
        topology = self.topology()
        if batches is not None:
            return self._state_of_rank(topology, batches)
        if not in_worker() and self._bookmark.workers:
            raise ConfigError(
                "the samples are read by a loader's workers, which are ahead of the training loop",
                remedy="use torchdata's StatefulDataLoader and its state_dict(); or call state_dict(batches=...) with "
                "the number of batches taken since the iteration began",
            )
        stream = self._stream or self._stream_of(self.epoch, topology, self._bookmark.states)
        own_loop = not in_worker() and not stateful_loader_asks()
        over = own_loop and self._is_over(stream) and self._ranks_end_together(stream, topology)
        return self._state(stream, topology, stream.tally.place, over=over).to_json()

    def _is_over(self, stream: EpochStream) -> bool:
        """Return whether the epoch has no more batches: at most a short one that the loader drops."""
        size, drop_last = self._bookmark.batching or (1, False)
        return stream.read or (stream.counted and stream.samples_left < (size if drop_last else 1))

    def load_state_dict(self, state: object) -> None:
        """Go on from a state at the next iteration of its epoch, exactly where it was taken.

        That is the next iteration, unless `set_epoch` says another epoch. From a state of an epoch's end, it reads the
        next epoch; if `set_epoch` names the one that has ended, it gives nothing, for nothing is left of that.

        The run may have other ranks and workers than the one that took the state: what is left of the epoch is dealt to
        them. The state of one rank with all its workers is enough, for ranks take their batches together; with those of
        several ranks in a list each counts for itself. Where `even` is None, ranks differ by a sample: then one rank's
        state is enough until one of its workers has come to the end of its share, and an error asks for the others'.

        Args:
            state: what `state_dict` returned, or whatever holds such states, as a StatefulDataLoader's own.

        Raises ConfigError when there is no state in it, or one of another dataset; the next iteration, when it does not
        tell where all readers were.
        """
        self._bookmark.load(state, worker=in_worker())
        self._reading = None

    def _state_of_rank(self, topology: Topology, batches: int) -> dict[str, Any]:
        """Return the states of all workers of this rank when so many batches were taken from them in turn."""
        _check_least(0, batches=batches)
        bookmark = self._bookmark
        states = bookmark.states_of_workers if bookmark.workers else bookmark.states
        workers = max(1, bookmark.workers)
        crew = [Topology(topology.rank, topology.world_size, worker, workers) for worker in range(workers)]
        streams = [self._stream_of(bookmark.epoch_begun, reader, states) for reader in crew]
        if not streams[0].counted:
            raise ConfigError(
                "how far a number of batches goes is not known: the samples of the shards are not counted",
                remedy="count them: shardcache index URL... -o index.json; or use torchdata's StatefulDataLoader",
            )
        size = self._dealing.batch_size
        loaders_size, drop_last = bookmark.batching or (size, False)
        if batches and loaders_size != size:
            raise ConfigError(
                f"how far batches go is not known: the loader's batch_size is {loaders_size}, the dataset's {size}",
                remedy=f"give it to both: ShardDataset(..., batch_size={loaders_size})"
                + ("; batches=... is then a number of samples" if loaders_size == 1 else ""),
            )
        left = [stream.samples_left // size * size if drop_last else stream.samples_left for stream in streams]
        taken = taken_in_turns(left, size, batches)
        over = taken == left and self._ranks_end_together(streams[0], crew[0])
        places = [stream.tally.place.after(count) for stream, count in zip(streams, taken, strict=True)]
        each = zip(streams, crew, places, strict=True)
        return {"workers": [self._state(*reader, over=over).to_json() for reader in each]}

    def _ranks_end_together(self, stream: EpochStream, reader: Topology) -> bool:
        """Return whether the epoch ends on all ranks after the same number of batches."""
        if reader.world_size == 1:
            return True
        deal, drop_last = stream.deal, (self._bookmark.batching or (1, False))[1]
        return isinstance(deal, SampleDeal) and deal.ends_together(
            self._cut(reader), stream.start.phases, drop_last=drop_last
        )

    def _state(self, stream: EpochStream, reader: Topology, place: Place, *, over: bool) -> State:
        """Return a reader's state; at an epoch's end, samples that the loader drops count as taken."""
        if over and stream.counted:
            place = stream.tally.place.after(stream.samples_left)
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

    # Who reads

    def topology(self) -> Topology:
        """Return which reader of the job this process is now."""
        return self._membership.topology()

    def _cut(self, topology: Topology) -> Cut:
        return Cut.of(topology, self._dealing.even, self._dealing.batch_size)

    def _refuse_resharding(self) -> None:
        refuse_resharding(self.topology(), self._membership.ranks_of_job.world_size)

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_resharding()  # a spawned worker does not see what its parent's loader does with its batches
        return self.__dict__ | {"_reading": None}


def _loader() -> Loader | None:
    """Return which DataLoader worker this process is, if it is one."""
    info = get_worker_info()
    return None if info is None else Loader(info.seed - info.id, info.id, info.num_workers)


def _loader_name() -> str:
    """Return a name that no other loader on this node has; empty in a process that is no loader's worker.

    Two runs may have the same seeds, and two containers the same process ids.
    """
    loader = _loader()
    return "" if loader is None else f"{os.stat('/proc/self/ns/pid').st_ino}-{os.getppid()}-{loader.number}"  # noqa: PTH116


def _handover(zero_copy: bool | str | Collection[str]) -> Handover:
    from shardcache_client.sharing.handover import Handover  # numpy is needed from here on

    if isinstance(zero_copy, bool):
        return Handover()
    extensions = [zero_copy] if isinstance(zero_copy, str) else zero_copy
    if any(extension.startswith(".") for extension in extensions):
        raise ConfigError(f"zero_copy is {zero_copy!r}", remedy='write extensions as in samples: "jpg", not ".jpg"')
    return Handover(frozenset(extension.lower() for extension in extensions))


def _let_collate_pass_buffers() -> None:
    """Have `default_collate` gather Buffers in a list, as it does with bytes, in this process."""
    from shardcache_client.sharing.buffers import Buffer, pass_on

    default_collate_fn_map[Buffer] = pass_on


def _check_least(least: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ConfigError(f"{name} is {number}", remedy=f"give {least} or more")
