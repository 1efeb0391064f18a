"""`IndexedShards`: the samples of a dataset by their number."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import Any, Generic, Self, SupportsIndex, cast

from shardcache.errors import ConfigError, SampleError
from shardcache_client.arguments import CHOSEN, SPLIT, checked
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.decoding.pipeline import Dropped
from shardcache_client.files.slicing import Sample
from shardcache_client.order.manifest import By, Choices, Manifest, Plan, split, subset
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.resharding import replicas_of_sampler_asking_length
from shardcache_client.reading.leased_shard import LeasedShard
from shardcache_client.reading.stream import StreamSettings
from shardcache_client.typed import T_co


def counts_of(manifest: Manifest) -> Sequence[int]:
    """Return the number of samples in each shard. Raises ConfigError if they are not counted."""
    if manifest.counts is None:
        raise ConfigError(
            f"samples have no numbers: {manifest.uncounted} of {len(manifest)} shards were never counted",
            remedy="count them once: shardcache index URL... -o index.json, then use index.json as the url",
        )
    return manifest.counts


@dataclass(frozen=True, slots=True)
class _Held:
    """A shard that is mapped, and the session that holds it in the cache.

    Attributes:
        chosen: numbers in the tar of the samples that belong to the dataset; None for all.
    """

    session: Session
    leased_shard: LeasedShard
    chosen: Sequence[int] | None

    def sample(self, number: int) -> Sample:
        return self.leased_shard.sample(number if self.chosen is None else self.chosen[number])

    def close(self) -> None:
        self.leased_shard.close()
        self.session.close()


class IndexedShards(Generic[T_co]):
    """A map-style dataset: `samples[i]` is sample i in the order of `urls`, decoded. Made by `ShardReader.indexed`.

    For evaluation with a sampler of one's own, such as torch's DistributedSampler, and for looking at data:

        samples = dataset.indexed()
        loader = DataLoader(samples, batch_size=64, sampler=DistributedSampler(samples, shuffle=False), num_workers=8)

    It is not divided among ranks: that is up to the sampler. If the dataset has a `mesh`, its ranks are the ones to
    divide among: `DistributedSampler(samples, num_replicas=mesh.size(), rank=…)`; any other number is a ConfigError.

    The shard of a sample is fetched as a whole when one of its samples is first asked for, and held until `window`
    others have been asked for since. So samples in order, or near each other, cost what they cost a ShardDataset, while
    a random order over a dataset larger than the cache fetches a shard for almost every sample: train with a
    ShardDataset, whose order is made for shards. Nothing is prefetched, and no sample is fetched alone: only a whole
    shard can be verified. With `partial_reads`, a sample is read as soon as its shard has arrived up to its end: the
    first ones of a large shard come at once, the last with the whole.

    Each process holds its own shards; a DataLoader's workers get a copy that holds none. Threads may share it, such as
    Grain's: they decode at the same time, but read, and wait for shards, one after the other.

    Raises, for a sample: what reading it raises; `on_error` is not called. IndexError for a number out of range.
    """

    def __init__(
        self, settings: StreamSettings, reader: ReaderIdentity, window: int, mesh: MeshRanks | None = None
    ) -> None:
        self._counts = counts_of(settings.manifest)
        if settings.pipeline.filters or settings.pipeline.missing == "skip":
            raise ConfigError(
                "with a filter, or missing='skip', some numbers would have no sample",
                remedy="omit it here; torch.utils.data.Subset takes the numbers of the samples that you want",
            )
        self._settings = settings
        self._reader = reader
        self._window = window
        self._mesh = mesh
        self._ends = list(accumulate(self._counts))
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by number of the shard, the last asked for at the end
        self._parents = self._held  # in a forked process, what the parent holds
        self._pid = os.getpid()
        self._lock = Lock()  # on what is held: one thread must not close the shard that another reads

    def __repr__(self) -> str:
        return f"IndexedShards({self._settings.manifest!r}, held={sorted(self._held)})"

    def __len__(self) -> int:
        replicas = replicas_of_sampler_asking_length()
        if self._mesh is not None and replicas not in (None, self._mesh.ranks.world_size):
            share = self._mesh.ranks
            raise ConfigError(
                f"the sampler divides samples among {replicas} ranks, the dataset's mesh among {share.world_size}",
                remedy=f"write DistributedSampler(..., num_replicas={share.world_size}, rank={share.rank})",
            )
        return self._ends[-1]

    def __getitem__(self, number: SupportsIndex) -> T_co:
        return self._decoded(*self._find(number))

    def __getitems__(self, numbers: Sequence[SupportsIndex]) -> list[T_co]:
        """Return several samples, in the order asked for; a DataLoader asks for a batch in this way."""
        places = [self._find(number) for number in numbers]
        by_shard = sorted(range(len(places)), key=places.__getitem__)
        samples = {nth: self._decoded(*places[nth]) for nth in by_shard}  # each its own, if asked for twice
        return [samples[nth] for nth in range(len(places))]

    @checked(numbers=CHOSEN)
    def subset(self, numbers: Iterable[SupportsIndex]) -> IndexedShards[T_co]:
        """Return the samples with these numbers, each once and in the order of `urls`, numbered from 0.

        torch.utils.data.Subset keeps an order of its own. Raises IndexError for a number out of range.
        """
        return self._selected(subset(self._counts, map(int, numbers)))

    @checked(**SPLIT)
    def split(self, *fractions: float, seed: int = 0, by: By = "samples") -> list[IndexedShards[T_co]]:
        """Return the parts of a random split, as `ShardDataset.split`; each part holds shards of its own."""
        return [self._selected(choices) for choices in split(self._counts, fractions, seed, by)]

    def _selected(self, choices: Choices) -> IndexedShards[T_co]:
        settings = replace(self._settings, manifest=self._settings.manifest.select(choices))
        return IndexedShards(settings, self._reader, self._window, self._mesh)

    def __iter__(self) -> Iterator[T_co]:
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all shards. Asking for a sample fetches its shard again."""
        self._leave_parent()
        with self._lock:
            while self._held:
                self._held.popitem()[1].close()

    def _find(self, number: SupportsIndex) -> tuple[int, int]:
        """Return the shard of a sample, and its number there."""
        place = operator.index(number)
        samples = self._ends[-1]
        if not -samples <= place < samples:
            raise IndexError(f"sample {place} of a dataset with {samples} samples")
        place %= samples
        shard = bisect_right(self._ends, place)
        return shard, place - (self._ends[shard - 1] if shard else 0)

    def _decoded(self, shard: int, number: int) -> T_co:
        sample, pipeline = self._sample(shard, number), self._settings.pipeline
        item: Any = pipeline(sample) if pipeline else sample
        assert item.__class__ is not Dropped
        return cast(T_co, item)

    def _sample(self, shard: int, number: int) -> Sample:
        self._leave_parent()
        with self._lock:
            held = self._hold(shard)
            try:
                return held.sample(number)
            except SampleError:
                raise
            except BaseException:  # the shard may have been replaced, or the wait for it interrupted: open it again
                self._held.pop(shard).close()
                raise

    def _leave_parent(self) -> None:
        """After a fork, hold nothing: the sessions are the parent's, and its threads may have held the lock."""
        if self._pid != os.getpid():
            self._parents, self._held, self._lock, self._pid = self._held, OrderedDict(), Lock(), os.getpid()

    def _hold(self, shard: int) -> _Held:
        if shard not in self._held:
            while len(self._held) >= self._window:
                self._held.popitem(last=False)[1].close()
            self._held[shard] = self._open(shard)
        self._held.move_to_end(shard)
        return self._held[shard]

    def _open(self, shard: int) -> _Held:
        manifest = self._settings.manifest
        session = self._settings.sessions.open(self._reader)
        try:
            session.declare(Plan.of(manifest, 0, [shard], ()))
            leased_shard = LeasedShard(
                session, session.lease(0), count=manifest[shard].samples, view=self._settings.pipeline.view(shard)
            )
            leased_shard.open()
            return _Held(session, leased_shard, manifest.chosen(shard))
        except BaseException:
            session.close()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"} | {
            "_held": OrderedDict(),
            "_parents": OrderedDict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())
