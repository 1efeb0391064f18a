"""Samples of a dataset by their number, and datasets of some of its samples."""

import json
import operator
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import Any, Generic, Self, SupportsIndex, cast

from shardcache.errors import ConfigError, SampleError
from shardcache.tarindex.contents import SUFFIX, IndexEntry, Row, entries_of
from shardcache.url_names import beside_index, is_index
from shardcache_client.arguments import CHOSEN, FUNCTION, SPLIT, T_co, checked
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.decoding import Dropped
from shardcache_client.files import Sample
from shardcache_client.order.manifest import By, Choices, Manifest, Marked, Plan, split, subset
from shardcache_client.ranks.group import MeshRanks, replicas_of_sampler_asking_length
from shardcache_client.reading.leased_shard import LeasedShard, ShardWindow
from shardcache_client.settings import DatasetSettings

_REMEDY = "write both files again: shardcache index URL... -o index.json --samples"


def _counts_of(manifest: Manifest) -> Sequence[int]:
    """Return the number of samples in each shard. Raises ConfigError if they are not counted."""
    if manifest.counts is None:
        raise manifest.uncounted_error("samples have no numbers")
    return manifest.counts


class Divisible(ABC):
    """A dataset of which samples can be chosen by their numbers."""

    manifest: Manifest

    @abstractmethod
    def _selected(self, choices: Choices) -> Self:
        """Return a dataset of some of the samples. Raises ConfigError if it would have none."""

    @checked(numbers=CHOSEN)
    def subset(self, numbers: Iterable[SupportsIndex]) -> Self:
        """Return a dataset of the samples with these numbers, such as `range(1000)`; otherwise as `select`.

        Samples are numbered in the order of `urls`, as by `indexed`. The subset has each of them once, in that order or
        its own shuffle's. Needs no table.

        Raises ConfigError if the samples are not counted, or without any number; IndexError for one out of range.
        """
        return self._selected(subset(_counts_of(self.manifest), map(int, numbers)))

    @checked(**SPLIT)
    def split(self, *fractions: float, seed: int = 0, by: By = "samples") -> list[Self]:
        """Return datasets that divide the samples of this one at random, such as for training and validation::

            train, val = dataset.split(0.9, 0.1)

        The parts depend on the shards' sample counts, the fractions and `seed` alone: they are the same in every
        process and run. Otherwise as `select`; needs no table.

        Args:
            fractions: of the samples, for each part; their sum is 1.
            seed: another seed gives another split.
            by: "samples": the parts have exactly these fractions of the samples, and nearly so of each shard, so that
                each part reads all shards. "shards": each shard belongs to one part, and the sizes are right to a
                shard: a part fetches no more than its own, and samples that were written together stay together.

        Raises ConfigError if the samples are not counted, for wrong fractions, or if a part would be empty.
        """
        return [self._selected(choices) for choices in split(_counts_of(self.manifest), fractions, seed, by)]


class Selecting(Divisible):
    """A dataset of which samples can be chosen by what the index says of them."""

    @abstractmethod
    def _rows_of_tables(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows of the sample tables, each with its table's url. Raises ConfigError if one is missing."""

    @checked(predicate=FUNCTION)
    def select(self, predicate: Callable[[IndexEntry], object]) -> Self:
        """Return a dataset of those samples for which `predicate(entry)` is true, chosen by the index alone::

            large = dataset.select(lambda entry: {"jpg", "txt"} <= entry.sizes.keys() and entry.sizes["jpg"] >= 10_000)

        An entry has the sample's `key`, the `sizes` of its members in bytes, by extension, the `url` of its shard, and
        `metadata`, the JSON object of one small member, if the table was made with `--metadata`.
        No sample is read for this; shards without a selected sample are never fetched. The selection is as good as a
        dataset written without the other samples: it has an exact length, ranks get equal numbers of samples, and its
        states resume on any number of ranks and workers. The predicate must be the same on all ranks; with
        torch.distributed, ranks that select different samples are an error. The dataset begins with the epoch of this
        one, and keeps epochs and states of its own.

        The entries are in a table of all samples, `index.samples` beside `index.json`, which `shardcache write`
        makes. The command `shardcache index URL... -o index.json --samples` writes both for other shards. With
        `--metadata json` it keeps the samples' `json` members in the table.

        Raises ConfigError if the urls are no index files, or for a table that is missing or belongs to other shards, or
        if no sample is selected, or for the metadata of a table without; and what reading the table and the predicate
        raise.
        """
        return self._selected(select(self.manifest, self._rows_of_tables(), predicate))


def tables_of(patterns: Sequence[str]) -> list[str]:
    """Return the urls of the sample tables beside index files. Raises ConfigError for a url of anything else."""
    for pattern in patterns:
        if not is_index(pattern):
            raise ConfigError(
                "select() needs a table of the samples, next to an index file",
                url=pattern,
                remedy="write both: shardcache index URL... -o index.json --samples; then use index.json as the url",
            )
    return [beside_index(pattern, SUFFIX) for pattern in patterns]


def row_of(sample: Sample) -> tuple[str, Row]:
    """Return the row that a sample of a table holds, with the table's url. Raises ValueError, KeyError."""
    return sample["__url__"], json.loads(sample["json"])


def select(manifest: Manifest, rows: Iterable[tuple[str, Row]], predicate: Callable[[IndexEntry], object]) -> Choices:
    """Return the choice of those samples of a manifest for which the predicate is true.

    Rows come with their tables' urls. Raises ConfigError if the tables belong to other shards.
    """
    marks = [bytearray() for _ in manifest]  # of the samples that belong to the dataset
    for shard, row, url in rows_by_shard(manifest, rows):
        try:
            entries = list(entries_of(row, manifest[shard].url))
        except _INVALID as exn:
            raise _invalid(exn, url) from exn
        marks[shard] += bytes(map(bool, map(predicate, entries)))
    among = zip(marks, map(manifest.chosen, range(len(manifest))), strict=True)
    return tuple(Marked.of(each if some is None else [each[number] for number in some]) for each, some in among)


# What the fields of a row raise that is not one.
_INVALID = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def rows_by_shard(manifest: Manifest, rows: Iterable[tuple[str, Row]]) -> Generator[tuple[int, Row, str]]:
    """Yield rows with the number of their shard in a manifest, and their table's url.

    Raises ConfigError if the tables belong to other shards; at the end, also if they do not cover all of these.
    """
    passed = [0] * len(manifest)
    table, begin, shard = "", 0, -1
    for url, row in rows:
        if url != table:
            table, begin = url, shard + 1
        try:
            shard = begin + row["shard"]
            known = row["first"] == passed[shard] and row["samples"] == manifest[shard].samples
            known = known and manifest[shard].version in (None, row["version"])
            passed[shard] += len(row["keys"])
        except _INVALID as exn:
            raise _invalid(exn, url) from exn
        if not known:
            raise ConfigError(
                f"the table of samples is not that of the index file: {manifest[shard].url} differs",
                url=url,
                remedy=_REMEDY,
            )
        yield shard, row, url
    for number, ref in enumerate(manifest):
        if passed[number] != ref.samples:
            raise ConfigError("the table of samples does not cover this shard completely", url=ref.url, remedy=_REMEDY)


def _invalid(exn: Exception, url: str) -> ConfigError:
    return ConfigError(f"the table of samples is invalid ({exn!r})", url=url, remedy=_REMEDY)


@dataclass(frozen=True, slots=True)
class _Held:
    """A shard that is mapped, the session that holds it in the cache, and the chosen samples (None for all)."""

    session: Session
    window: ShardWindow
    leased_shard: LeasedShard
    chosen: Sequence[int] | None

    def sample(self, number: int) -> Sample:
        return self.leased_shard.sample(number if self.chosen is None else self.chosen[number])

    def close(self) -> None:
        self.window.empty()
        self.session.close()


class IndexedShards(Divisible, Generic[T_co]):
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
        self, settings: DatasetSettings, reader: ReaderIdentity, window: int, mesh: MeshRanks | None = None
    ) -> None:
        self.manifest = settings.manifest
        if settings.pipeline.filters or settings.pipeline.missing == "skip":
            raise ConfigError(
                "with a filter, or missing='skip', some numbers would have no sample",
                remedy="omit it here; torch.utils.data.Subset takes the numbers of the samples that you want",
            )
        self._settings = settings
        self._reader = reader
        self._window = window
        self._mesh = mesh
        self._ends = list(accumulate(_counts_of(self.manifest)))
        self._held: OrderedDict[int, _Held] = OrderedDict()  # by number of the shard, the last asked for at the end
        self._parents = self._held  # in a forked process, what the parent holds
        self._pid = os.getpid()
        self._lock = Lock()  # on what is held: one thread must not close the shard that another reads

    def __repr__(self) -> str:
        return f"IndexedShards({self.manifest!r}, held={sorted(self._held)})"

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

    def _selected(self, choices: Choices) -> Self:
        settings = replace(self._settings, manifest=self.manifest.select(choices))
        return type(self)(settings, self._reader, self._window, self._mesh)

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
        manifest, session = self.manifest, self._settings.sessions.open(self._reader)
        try:
            session.declare(plan := Plan.of(manifest, 0, [shard]))
            window = ShardWindow(session, plan, partial=None, view_of=self._settings.pipeline.view)
            session.on_wait = None  # a cycle would keep the session of a reader that is gone
            leased_shard = window.take(shard, manifest[shard].samples)
            leased_shard.open()
            return _Held(session, window, leased_shard, manifest.chosen(shard))
        except BaseException:
            session.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._settings, self._reader, self._window, self._mesh)
