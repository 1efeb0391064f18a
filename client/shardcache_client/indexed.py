"""Samples of a dataset by their number or key."""

from __future__ import annotations

import operator
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock
from typing import Any, Generic, Self, SupportsIndex, cast, overload

from shardcache.errors import CapacityError, ConfigError, SampleKeyError
from shardcache_client.arguments.values import T_co, shown
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.order.shards.choices import Choices
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.parts.selecting import Divisible, counts_of
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.resharding import replicas_of_sampler_asking_length
from shardcache_client.reading.leased.held_shards import HeldShards, RecentRanges
from shardcache_client.reading.single.sample_keys import SampleKeys, near_keys
from shardcache_client.reading.single.sample_places import SamplePlace, SamplePlaces
from shardcache_client.reading.single.scattered_samples import ScatteredSamples
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.item_stage import Dropped
from shardcache_client.stages.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sample that is asked for.

    Attributes:
        key: that it must have; empty if it is asked for by its number.
        numbers: of the samples that it may be, as keys are alike in what is kept of them.
    """

    key: str
    numbers: Sequence[int]

    def is_key_of(self, sample: Sample) -> bool:
        """Return whether a sample is the one that is asked for."""
        return not self.key or sample["__key__"] == self.key

    def repeated(self) -> SampleKeyError:
        """Return the error for a key that several samples have."""
        numbers = ", ".join(map(str, self.numbers))
        return SampleKeyError(
            f"several samples have the key {shown(self.key)}",
            remedy=f"ask for one by its number: {numbers}",
        )


class IndexedShards(Divisible, Generic[T_co]):
    """A map-style dataset: `samples[i]` is sample i in the order of `urls`, decoded.

    Made by `ShardReader.indexed`.

    For evaluation with your own sampler, such as torch's DistributedSampler, and for looking at
    data:

        samples = dataset.indexed()
        sampler = DistributedSampler(samples, shuffle=False)
        loader = DataLoader(samples, batch_size=64, sampler=sampler, num_workers=8)

    It is not divided among ranks: the sampler does that. If the dataset has a `mesh`, its ranks are
    the ones to divide among: `DistributedSampler(samples, num_replicas=mesh.size(), rank=…)`; any
    other number is a ConfigError.

    A list gives several samples, in the order asked for: `samples[[3, 1, 4]]`. A key gives the
    sample that the table of samples has for it: `samples["000003"]`.

    With a table of samples next to each index file (`shardcache index --samples`), only the bytes
    of a sample are fetched, and with `members` only those of the members that are read; all samples
    of a list, or of a DataLoader's batch, at the same time. The daemon keeps them as parts of the
    shard, and fetches all of it once much of it was read (`--whole-from-percent`). A shard whose
    samples are read in order, or that is cached, is mapped instead, and held until `window` others
    have been asked for since: such samples cost what they cost a ShardDataset. A sample whose place
    is not in the table is read with its whole shard, which is not prefetched. So are all samples of
    compressed shards, of a table of an earlier release, of blocks of tokens, of Joined, and of urls
    that are not index files. With `partial_reads`, such a sample is read as soon as its shard has
    arrived up to the sample's end.

    Each process holds its own shards and tables; a DataLoader's workers get a copy that holds none.
    Threads may share it, such as Grain's: they decode, and read samples by their ranges, at the
    same time, but wait for whole shards one after the other.

    Raises, for a sample: what reading it raises; `on_error` is not called. IndexError for a number
    out of range; SampleKeyError, which is a KeyError, for a key that no sample has, or several;
    ConfigError for a key without a table, and for a table of other shards.
    """

    def __init__(
        self,
        manifest: Manifest,
        pipeline: Pipeline,
        sessions: ReaderSessions,
        window: int,
        mesh: MeshRanks | None = None,
        tables: Sequence[str] = (),
    ) -> None:
        if pipeline.leaves_out:
            raise ConfigError(
                "with a filter, or missing='skip', some numbers would have no sample",
                remedy="omit it here; torch.utils.data.Subset takes the numbers of the samples "
                "that you want",
            )
        self._manifest = manifest
        self._pipeline = pipeline
        self._sessions = sessions
        self._window = window
        self._mesh = mesh
        self._tables = tables
        # Number of samples up to the end of each shard.
        self._ends = list(accumulate(counts_of(manifest)))
        # Numbers in the tar of a shard's samples that were selected.
        self._chosen: dict[int, array[int]] = {}
        self._keys: SampleKeys | None = None  # read once a sample is asked for by its key
        self._places = SamplePlaces(manifest, tables, sessions, pipeline)
        self._open_none()

    def _open_none(self) -> None:
        """Begin without sessions."""
        self._held = HeldShards(self._manifest, self._pipeline, self._sessions, self._window)
        self._recent = RecentRanges(self._window)
        self._scattered = ScatteredSamples(self._manifest, self._pipeline, self._sessions)
        self._pid = os.getpid()
        # On what is held: one thread must not close the shard that another reads.
        self._lock = Lock()

    @property
    def manifest(self) -> Manifest:
        """The shards in the order of `urls`, with sizes and sample counts."""
        return self._manifest

    def __repr__(self) -> str:
        return f"IndexedShards({self.manifest!r}, held={self._held.numbers})"

    def __len__(self) -> int:
        replicas = replicas_of_sampler_asking_length()
        if self._mesh is not None and replicas not in (None, self._mesh.ranks.world_size):
            share = self._mesh.ranks
            raise ConfigError(
                f"the sampler divides samples among {replicas} ranks, the dataset's mesh among "
                f"{share.world_size}",
                remedy=f"write DistributedSampler(..., num_replicas={share.world_size}, "
                f"rank={share.rank})",
            )
        return self._ends[-1]

    @overload
    def __getitem__(self, number: SupportsIndex | str) -> T_co: ...  # type: ignore[overload-overlap]

    @overload
    def __getitem__(self, number: Iterable[SupportsIndex | str]) -> list[T_co]: ...

    def __getitem__(
        self, number: SupportsIndex | str | Iterable[SupportsIndex | str]
    ) -> T_co | list[T_co]:
        """Return a sample by its number or key; a list of some for a list of these."""
        if isinstance(number, list | tuple) or not isinstance(number, str | SupportsIndex):
            return self.__getitems__(list(number))
        (item,) = self.__getitems__([number])
        return item

    def __getitems__(self, numbers: Sequence[SupportsIndex | str]) -> list[T_co]:
        """Return several samples, in the order asked for, as a DataLoader asks for a batch."""
        self._leave_parent()
        asked = [self._asked(number) for number in numbers]
        # All samples that may have a key are read. A sample that is asked for twice is read twice.
        owners = [nth for nth, each in enumerate(asked) for _ in each.numbers]
        places = [self._place_of(number) for each in asked for number in each.numbers]
        items: dict[int, T_co] = {}
        for nth, sample in self._read(places):
            owner = owners[nth]
            if not asked[owner].is_key_of(sample):
                continue
            if owner in items:
                raise asked[owner].repeated()
            items[owner] = self._decoded(sample)
        for nth, each in enumerate(asked):
            if nth not in items:
                raise self._unknown(each.key)
        return [items[nth] for nth in range(len(asked))]

    def _selected(self, choices: Choices) -> Self:
        chosen = self._manifest.select(choices)
        return type(self)(
            chosen, self._pipeline, self._sessions, self._window, self._mesh, self._tables
        )

    def __iter__(self) -> Iterator[T_co]:
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all shards and tables. Asking for a sample fetches its shard again."""
        self._leave_parent()
        with self._lock:
            self._held.close()
            self._scattered.close()
            self._places.close()

    def _asked(self, number: SupportsIndex | str) -> _Asked:
        """Return what a number or key asks for. Raises IndexError, and what the tables raise."""
        if isinstance(number, str):
            with self._lock:
                if self._keys is None:
                    self._keys = SampleKeys(self._key_checks(), self._ends[-1])
            return _Asked(number, self._keys.numbers(number))
        index = operator.index(number)
        samples = self._ends[-1]
        if not -samples <= index < samples:
            raise IndexError(f"sample {shown(index)} of a dataset with {samples} samples")
        return _Asked("", [index % samples])

    def _place_of(self, number: int) -> tuple[int, int]:
        """Return the shard of a sample, and its number in the tar."""
        shard = bisect_right(self._ends, number)
        first = self._ends[shard - 1] if shard else 0
        chosen = self._numbers_in(shard)
        in_tar = number - first
        if chosen is not None:
            in_tar = chosen[in_tar]
        return shard, in_tar

    def _numbers_in(self, shard: int) -> array[int] | None:
        """Return the numbers in the tar of a shard's samples; None for all of them."""
        if self._manifest.choices is None or self._manifest.choices[shard] is None:
            return None
        if shard not in self._chosen:
            self._chosen[shard] = array("I", self._manifest.chosen(shard) or ())
        return self._chosen[shard]

    def _key_checks(self) -> Iterator[int]:
        """Yield what is kept of each sample's key, by its number."""
        for shard in range(len(self._manifest)):
            checks = self._places.checks(shard)
            chosen = self._numbers_in(shard)
            yield from checks if chosen is None else map(checks.__getitem__, chosen)

    def _unknown(self, key: str) -> SampleKeyError:
        with self._lock:
            near = near_keys(key, self._places.keys())
        message = f"no sample has the key {shown(key)}"
        if near:
            message += f"; near it are {', '.join(map(repr, near))}"
        return SampleKeyError(
            message, remedy="keys are those of the tar, with folders, without the extension"
        )

    def _decoded(self, sample: Sample) -> T_co:
        item: Any = sample
        if self._pipeline:
            item = self._pipeline(item)
        assert item.__class__ is not Dropped
        return cast(T_co, item)

    def _read(self, places: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Sample]]:
        """Yield samples, each with its number in `places`, as they are best read.

        Args:
            places: shards, and numbers in their tars.
        """
        # 1. Those that are best read by their ranges, all at the same time.
        ranged: dict[int, SamplePlace] = {}
        by_shard = sorted(range(len(places)), key=places.__getitem__)
        with self._lock:
            for nth in by_shard:
                place = self._range_of(*places[nth])
                if place is not None:
                    ranged[nth] = place
        yield from self._read_ranges(ranged)

        # 2. The others from their shards, one shard after another.
        unheld: dict[int, SamplePlace] = {}
        for nth in by_shard:
            if nth in ranged:
                continue
            with self._lock:
                place = self._hold(*places[nth])
                if place is None:
                    sample = self._held.sample(*places[nth])
            if place is None:
                yield nth, sample
            else:
                unheld[nth] = place

        # 3. By their ranges after all: the cache had no space for their shards.
        yield from self._read_ranges(unheld)

    def _read_ranges(self, ranged: dict[int, SamplePlace]) -> Iterator[tuple[int, Sample]]:
        """Yield samples that are read by their ranges, each with its number."""
        found = self._scattered.read(list(ranged.values()))
        for nth, (sample, is_cached) in zip(ranged, found, strict=True):
            if is_cached:
                self._recent.found_cached(ranged[nth].shard)
            yield nth, sample

    def _hold(self, shard: int, number: int) -> SamplePlace | None:
        """Hold a shard; return the place of its sample if the cache has no space for all of it."""
        if shard in self._held:
            return None
        place = None if self._manifest.columns else self._places.place(shard, number)
        if place is not None and self._recent.is_too_large(shard):
            return place
        try:
            self._held.hold(shard)
        except CapacityError:
            if place is None:
                raise
            self._recent.cannot_hold(shard)
            return place
        return None

    def _range_of(self, shard: int, number: int) -> SamplePlace | None:
        """Return the place of a sample that is read by its range; None if its shard is held."""
        if shard in self._held or self._manifest.columns:
            return None
        place = self._places.place(shard, number)
        if place is None or self._recent.is_better_held(shard, number):
            return None
        return place

    def _leave_parent(self) -> None:
        """Hold nothing after a fork.

        The sessions are the parent's, and its threads may have held the lock.
        """
        if self._pid != os.getpid():
            self._parents = (self._held, self._scattered)  # not to be closed here
            self._places.forget()
            self._open_none()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self._manifest,
            self._pipeline,
            self._sessions,
            self._window,
            self._mesh,
            self._tables,
        )
