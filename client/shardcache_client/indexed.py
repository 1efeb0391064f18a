"""Samples of a dataset by their number or key.

A sample is read in one of two ways: by its range (its bytes alone are fetched, if a table of
samples lists its range), or from its shard, which is then held, that is, leased and mapped for
further samples.
"""

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

from shardcache.shared.exceptions import CapacityError, ConfigError, SampleKeyError
from shardcache_client.arguments.values import T_co, shown
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.order.shards.choices import Choices
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.share_places import SampleId
from shardcache_client.parts.selecting import Divisible, counts_of
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.resharding import replicas_of_sampler_asking_length
from shardcache_client.reading.leased.held_shards import HeldShards, RecentRanges
from shardcache_client.reading.single.sample_keys import SampleKeys, near_keys
from shardcache_client.reading.single.sample_ranges import SampleRange, SampleRanges
from shardcache_client.reading.single.scattered_samples import ScatteredSamples
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.item_stage import Dropped
from shardcache_client.stages.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class _SampleQuery:
    """A request for one sample, by its number or its key.

    Attributes:
        key: key that the sample must have; None if the sample is asked for by its number.
        numbers: numbers of the samples that may have the key. There may be several, as only a
            short hash of each key is kept in memory.
    """

    key: str | None
    numbers: Sequence[int]

    def matches(self, sample: Sample) -> bool:
        """Return whether a sample with one of the numbers has the key, if a key is asked for."""
        return self.key is None or sample["__key__"] == self.key

    def repeated_error(self) -> SampleKeyError:
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

    The dataset is not divided among ranks: the sampler does that. If the dataset has a `mesh`, the
    sampler must divide among the ranks of the mesh: `DistributedSampler(samples,
    num_replicas=mesh.size(), rank=…)`; any other number is a ConfigError.

    A list gives several samples, in the order asked for: `samples[[3, 1, 4]]`. A key gives the
    sample that the table of samples has for it: `samples["000003"]`.

    With a table of samples next to each index file (`shardcache index --samples`), only the bytes
    of a sample are fetched, or with `members` only the bytes of the members that are read. Other
    members that lie between these are fetched with them if they have less than 512 KiB together.
    All samples of a list, or of a DataLoader's batch, are fetched at the same time. The daemon
    keeps the bytes as parts of the shard, and fetches the whole shard once much of it was read
    (`--whole-from-percent`). A shard whose samples are read in order, or that is cached, is mapped
    instead, and held until `window` other shards have been asked for since: its samples are read as
    fast as by a ShardDataset.

    A sample without a range in the table is read with its whole shard, which is not prefetched. No
    sample has a range if its shard is compressed, if an earlier release wrote the table, if samples
    are blocks of tokens, if the dataset is Joined, or if the urls are not index files. With
    `partial_reads`, a sample without a range is read as soon as its shard has arrived up to the
    sample's end.

    Each process holds its own shards and tables; a DataLoader's workers get a copy that holds none.
    Threads, such as Grain's, may share the dataset: they decode, and read samples by their ranges,
    at the same time, but wait for whole shards one after the other.

    Raises, for a sample: any error of reading the sample (`on_error` is not called); IndexError for
    a number out of range; SampleKeyError, which is a KeyError, for a key that no sample has, or
    several samples have; ConfigError for a key without a table, and for a table of other shards.

    Args:
        manifest: the shards, with their numbers of samples.
        pipeline: makes items of samples.
        sessions: opens sessions with the daemon.
        window: maximum number of shards that are held at a time.
        mesh: the ranks that a sampler has to divide the samples among; None for any ranks.
        tables: urls of the tables of samples, which list each sample's key and range in its tar;
            empty without index files.
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
        # For each shard, the number of samples in all shards up to its end.
        self._ends = list(accumulate(counts_of(manifest)))
        # If the user has selected samples, as by a split: for each shard, the numbers in the tar of
        # the selected samples. A shard of which all samples are selected has no entry.
        self._selected_numbers: dict[int, array[int]] = {}
        self._keys: SampleKeys | None = None  # read when a sample is first asked for by its key
        self._ranges = SampleRanges(manifest, tables, sessions, pipeline)
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        """Begin without sessions, held shards and records of their use."""
        self._held = HeldShards(self._manifest, self._pipeline, self._sessions, self._window)
        self._recent = RecentRanges(self._window)
        self._scattered = ScatteredSamples(self._manifest, self._pipeline, self._sessions)
        # Guards the held shards and the tables: no thread may close a shard that another thread is
        # reading.
        self._lock = Lock()
        self._pid = os.getpid()  # set last: a thread that finds this process's id takes the lock

    @property
    def manifest(self) -> Manifest:
        """The shards in the order of `urls`, with sizes and sample counts."""
        return self._manifest

    def __repr__(self) -> str:
        return f"IndexedShards({self.manifest!r}, held={self._held.numbers})"

    def __len__(self) -> int:
        # The function looks at the frame that called this method: a DistributedSampler asks for the
        # length in its constructor. The result is None for any other caller.
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
        """Return the sample with a number or key, or a list of samples for several of them.

        A negative number counts from the end.
        """
        # A list is recognised before the test for the protocol, which takes much longer. An array
        # of numpy or torch passes that test, too, whatever its number of dimensions.
        is_list = isinstance(number, list | tuple)
        is_array = getattr(number, "ndim", 0) > 0
        if is_list or is_array or not isinstance(number, str | SupportsIndex):
            return self.__getitems__(list(cast("Iterable[SupportsIndex | str]", number)))
        (item,) = self.__getitems__([number])
        return item

    def __getitems__(self, numbers: Sequence[SupportsIndex | str]) -> list[T_co]:
        """Return several samples, in the order asked for, as a DataLoader asks for a batch."""
        self._forget_if_forked()
        queries = [self._query(number) for number in numbers]
        # All samples that may have a key are read. A sample that is asked for twice is read twice.
        sample_ids: list[SampleId] = []
        query_of_sample: list[int] = []  # for each of these samples, the number of its query
        for nth, query in enumerate(queries):
            for number in query.numbers:
                sample_ids.append(self._sample_id(number))
                query_of_sample.append(nth)

        items: dict[int, T_co] = {}  # the decoded samples by number of the query
        for index, sample in self._read(sample_ids):
            nth = query_of_sample[index]
            if not queries[nth].matches(sample):
                continue
            if nth in items:
                raise queries[nth].repeated_error()
            items[nth] = self._decoded(sample)
        for nth, query in enumerate(queries):
            if nth not in items:
                assert query.key is not None  # a query by number always has its sample
                raise self._unknown_key(query.key)
        return [items[nth] for nth in range(len(queries))]

    def __iter__(self) -> Iterator[T_co]:
        return map(self.__getitem__, range(len(self)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all shards and tables. Asking for a sample fetches its shard again."""
        self._forget_if_forked()
        with self._lock:
            self._held.close()
            self._scattered.close()
            self._ranges.close()

    def _selected(self, choices: Choices) -> Self:
        """Return a dataset of some of the samples; `Divisible` calls this."""
        chosen = self._manifest.select(choices)
        return type(self)(
            chosen, self._pipeline, self._sessions, self._window, self._mesh, self._tables
        )

    def _query(self, number_or_key: SupportsIndex | str) -> _SampleQuery:
        """Return the query for a number or key. Raises IndexError, and any error of the tables."""
        if isinstance(number_or_key, str):
            key = number_or_key
            with self._lock:
                if self._keys is None:
                    self._keys = SampleKeys(self._key_hashes(), self._ends[-1])
            return _SampleQuery(key, self._keys.numbers(key))
        number = operator.index(number_or_key)
        samples = self._ends[-1]
        if not -samples <= number < samples:
            raise IndexError(f"sample {shown(number)} of a dataset with {samples} samples")
        # A negative number counts from the end.
        return _SampleQuery(None, [number % samples])

    def _sample_id(self, number: int) -> SampleId:
        """Return the shard of a sample, and its number in the tar."""
        shard = bisect_right(self._ends, number)
        first = self._ends[shard - 1] if shard else 0
        selected = self._selected_in(shard)
        number_in_tar = number - first
        if selected is not None:
            number_in_tar = selected[number_in_tar]
        return shard, number_in_tar

    def _selected_in(self, shard: int) -> array[int] | None:
        """Return the numbers, in the tar, of a shard's selected samples.

        Returns None if all samples of the shard are selected.
        """
        choices = self._manifest.choices
        choice = None if choices is None else choices[shard]
        if choice is None:
            return None
        if shard not in self._selected_numbers:
            self._selected_numbers[shard] = array("I", choice.numbers())
        return self._selected_numbers[shard]

    def _key_hashes(self) -> Iterator[int]:
        """Yield the hash of each sample's key, in the order of the samples' numbers."""
        for shard in range(len(self._manifest)):
            key_hashes = self._ranges.key_hashes(shard)
            selected = self._selected_in(shard)
            if selected is None:
                yield from key_hashes
            else:
                yield from map(key_hashes.__getitem__, selected)

    def _unknown_key(self, key: str) -> SampleKeyError:
        """Return the error for a key that no sample has."""
        with self._lock:
            near = near_keys(key, self._ranges.keys())
        message = f"no sample has the key {shown(key)}"
        if near:
            message += f"; near it are {', '.join(map(repr, near))}"
        return SampleKeyError(
            message, remedy="keys are those of the tar, with folders, without the extension"
        )

    def _decoded(self, sample: Sample) -> T_co:
        """Return what the pipeline makes of a sample."""
        item: Any = sample
        if self._pipeline:
            item = self._pipeline(item)
        assert item.__class__ is not Dropped  # a pipeline that leaves out samples is refused
        return cast(T_co, item)

    def _read(self, sample_ids: Sequence[SampleId]) -> Iterator[tuple[int, Sample]]:
        """Yield samples in the order in which reading them is fastest.

        Each sample comes with its index in `sample_ids`.
        """
        # Indices in `sample_ids`, in the order of the samples' shards and numbers.
        indices = sorted(range(len(sample_ids)), key=sample_ids.__getitem__)

        # 1. Read samples that are best read by their ranges, all at the same time.
        range_of_index: dict[int, SampleRange] = {}
        with self._lock:
            for index in indices:
                shard, number = sample_ids[index]
                byte_range = self._range_if_better(shard, number)
                if byte_range is not None:
                    range_of_index[index] = byte_range
        yield from self._read_ranges(range_of_index)

        # 2. Read the other samples from their shards, one shard after another.
        beyond_capacity: dict[int, SampleRange] = {}  # by index as well
        for index in indices:
            if index in range_of_index:
                continue
            shard, number = sample_ids[index]
            with self._lock:
                is_held = self._hold(shard, number)
                if is_held:
                    sample = self._held.sample(shard, number)
                else:
                    byte_range = self._range_of(shard, number)
                    assert byte_range is not None  # `_hold` raises an error otherwise
                    beyond_capacity[index] = byte_range
            if is_held:
                yield index, sample

        # 3. If the cache had no space for a shard, read its samples by their ranges after all.
        yield from self._read_ranges(beyond_capacity)

    def _read_ranges(self, range_of_index: dict[int, SampleRange]) -> Iterator[tuple[int, Sample]]:
        """Yield samples that are read by their ranges, each with its index."""
        samples = self._scattered.read(list(range_of_index.values()))
        for index, (sample, is_cached) in zip(range_of_index, samples, strict=True):
            if is_cached:
                # After several reads from a shard that is cached as a whole, `_range_if_better`
                # prefers to hold the shard, which is then faster to read.
                self._recent.note_cached(range_of_index[index].shard)
            yield index, sample

    def _range_if_better(self, shard: int, number: int) -> SampleRange | None:
        """Return the range of a sample that is best read by its range.

        Returns None if the sample is to be read from its shard, which is or will be held.
        """
        if shard in self._held:
            return None  # its samples need no requests
        byte_range = self._range_of(shard, number)
        if byte_range is None:
            return None
        # The requests so far decide whether holding the shard pays off.
        is_better_held = self._recent.note_request(shard, number)
        return None if is_better_held else byte_range

    def _hold(self, shard: int, number: int) -> bool:
        """Hold a sample's shard; return False if the cache has no space for the shard.

        If it returns False, the sample is to be read by its range. Raises CapacityError if the
        cache has no space and the sample has no range, and any error of opening the shard.
        """
        if shard in self._held:
            return True
        has_range = self._range_of(shard, number) is not None
        if has_range and self._recent.is_too_large(shard):
            return False
        try:
            self._held.hold(shard)
        except CapacityError:
            if not has_range:
                raise
            self._recent.note_too_large(shard)
            return False
        return True

    def _range_of(self, shard: int, number: int) -> SampleRange | None:
        """Return a sample's range; None if no table lists it, or if the samples are of a join.

        Samples of a join are made of whole shards.
        """
        if self._manifest.columns:
            return None
        return self._ranges.range_of(shard, number)

    def _forget_if_forked(self) -> None:
        """In a forked process, leave all held shards, sessions and tables to the parent process.

        The lock is replaced, too, because a thread of the parent may have held it during the fork.
        """
        if self._pid != os.getpid():
            # The references are kept, so that no finalizer of these objects runs in this process:
            # the sessions and the maps belong to the parent process.
            self._of_parent = (self._held, self._scattered)
            self._ranges.forget()
            self._hold_nothing()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (
            self._manifest,
            self._pipeline,
            self._sessions,
            self._window,
            self._mesh,
            self._tables,
        )
