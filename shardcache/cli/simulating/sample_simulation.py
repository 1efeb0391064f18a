"""Simulation of `shuffle="global"`: samples that are read by their ranges in the shards.

`simulate` uses this module with --global-shuffle. All samples are permuted, so that a rank reads
single samples from everywhere. A node's cache then holds parts of an object, pieces of a fixed size
that are fetched as a unit; if most parts of an object are wanted, the whole object is fetched. A
rank asks for its next samples ahead of time, within a budget of cache space. The client's deal
assigns the samples of an epoch to ranks; a share is what one rank gets.
"""

from __future__ import annotations

import json
import tarfile
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardcache.plan.object_parts import AHEAD_DIVISOR
from shardcache.plan.part_replay import AskedRange, PartReplay, PartRules
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.protocol import Json

if TYPE_CHECKING:
    from shardcache.cli.simulating.simulated_run import SimulatedRun
    from shardcache.config.origin_table import OriginTable
    from shardcache_client.order.shards.manifest import Manifest

_REMEDY = "write both files again: shardcache index URL... -o index.json --samples"


class _SampleRange(NamedTuple):
    """Range of a sample in its shard.

    Attributes:
        shard: number of the shard.
        start: offset of the sample's first byte.
        stop: offset of the byte after the sample's last.
    """

    shard: int
    start: int
    stop: int


class SamplePositions:
    """Ranges of a dataset's samples in its shards, from the sample table next to the index file.

    The ranges take 16 bytes of memory per sample.

    Args:
        sizes: size of each shard in bytes.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._starts = [array("Q") for _ in sizes]
        self._stops = [array("Q") for _ in sizes]

    @classmethod
    def read(cls, index: Path, manifest: Manifest) -> SamplePositions:
        """Read the sample table next to an index file.

        Raises ConfigError if there is no table, or it does not match the index file.

        Args:
            index: path of the index file.
            manifest: the shards of the index file.
        """
        from shardcache.shared.tarindex.contents import SUFFIX
        from shardcache.shared.urls.url_names import beside_index

        # The table is a tar archive, in which each file is a row as JSON.
        table = Path(beside_index(str(index), SUFFIX))
        positions = cls(manifest.shards.sizes)
        try:
            with tarfile.open(table) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if file is not None:
                        positions._add_row(json.load(file))
        except (OSError, tarfile.TarError, KeyError, TypeError, ValueError, IndexError) as exn:
            raise ConfigError(
                f"cannot read the table of samples, which says where each is in its shard: {exn}",
                url=str(table),
                remedy=_REMEDY,
            ) from None
        counts = [len(starts) for starts in positions._starts]
        if counts != list(manifest.counts or ()):
            raise ConfigError(
                "the table of samples does not match the index file",
                url=str(table),
                remedy=_REMEDY,
            )
        return positions

    def range_of(self, shard: int, number: int) -> _SampleRange:
        """Return the range of the sample `number` of a shard."""
        return _SampleRange(shard, self._starts[shard][number], self._stops[shard][number])

    @property
    def all_bytes(self) -> int:
        """Size of all samples together."""
        total = 0
        for starts, stops in zip(self._starts, self._stops, strict=True):
            total += sum(stops) - sum(starts)
        return total

    def _add_row(self, row: dict[str, Any]) -> None:
        """Add the samples of a row of the table, which lists some samples of one shard in order."""
        from shardcache.shared.tarindex.spans import RowSpans

        shard = row["shard"]
        spans = RowSpans.of(row)
        # A sample that has no span of its own is read by fetching the whole shard.
        whole_shard = (0, self._sizes[shard])
        for number in range(len(spans)):
            start, stop = spans.span(number) or whole_shard
            self._starts[shard].append(start)
            self._stops[shard].append(stop)


@dataclass(slots=True)
class _AheadBudget:
    """Space in a node's cache for ranges that its readers have asked for and not read yet.

    Attributes:
        limit_bytes: size of the space.
        taken_bytes: size of these ranges.
    """

    limit_bytes: int
    taken_bytes: int = 0


class _SampleReader:
    """A rank that reads samples one by one, and asks for the next samples ahead of time.

    Args:
        cache: cache of the rank's node.
        ranges: ranges of the samples, in the order in which they are read.
        idle_steps: number of steps to wait before the first sample.
        budget: the budget that all readers of the node share.
        max_asked: maximum number of samples that are asked for and not read yet.
        max_planned: maximum number of samples that are announced and not asked for yet.
        number: number of the reader in the cache's plans.
    """

    def __init__(
        self,
        cache: PartReplay,
        ranges: Iterator[_SampleRange],
        idle_steps: int,
        budget: _AheadBudget,
        max_asked: int,
        max_planned: int,
        number: int,
    ) -> None:
        self._cache = cache
        self._ranges = ranges
        self._max_planned = max_planned
        self._plan = cache.plan(number)
        self._planned: deque[_SampleRange] = deque()
        self._planned_count = 0  # number of samples announced so far
        self._read_count = 0  # number of samples read so far
        self._idle_steps = idle_steps
        self._budget = budget
        self._max_asked = max_asked
        self._asked: deque[AskedRange] = deque()

    def step(self) -> bool:
        """Read the next sample; return False if all samples have been read."""
        if self._idle_steps:
            self._idle_steps -= 1
            return True
        self._ask_ahead()
        if not self._asked:
            return False
        asked = self._asked.popleft()
        self._budget.taken_bytes -= asked.kept_bytes
        self._plan.passed(self._read_count)
        self._read_count += 1
        self._cache.read(asked)
        return True

    def _plan_ahead(self) -> None:
        """Announce the samples that are asked for next."""
        while len(self._planned) < self._max_planned:
            sample_range = next(self._ranges, None)
            if sample_range is None:
                return
            self._plan.add([(self._planned_count, self._cache.names(*sample_range))])
            self._planned_count += 1
            self._planned.append(sample_range)

    def _ask_ahead(self) -> None:
        """Ask for the next samples within the budget, but always for one at least."""
        self._plan_ahead()
        while self._planned and len(self._asked) < self._max_asked:
            if self._asked and self._budget.taken_bytes >= self._budget.limit_bytes:
                return
            asked = self._cache.ask(*self._planned.popleft())
            self._asked.append(asked)
            self._budget.taken_bytes += asked.kept_bytes


class SampleSimulation:
    """Fetches of the nodes of a run that permutes all samples.

    Args:
        run: the run's options.
        positions: ranges of the samples in their shards.
        part_bytes: size of a part.
        max_share: share of an object's parts, from 0 to 1, above which the whole is fetched.
    """

    def __init__(
        self,
        run: SimulatedRun,
        positions: SamplePositions,
        *,
        part_bytes: int,
        max_share: float,
    ) -> None:
        from shardcache.store.part_file import JOURNAL_BYTES
        from shardcache.store.space import footprint_bytes, typical_sidecar_bytes

        self._run = run
        # It is never None for the manifest of an index file.
        self._sample_count = run.manifest.samples or 0
        self._positions = positions
        self._rules = PartRules(
            capacity_bytes=run.disk_bytes,
            part_bytes=part_bytes,
            max_share=max_share,
            reserved_bytes=footprint_bytes,
            file_extra_bytes=JOURNAL_BYTES,
            # Objects that are fetched whole are not indexed, so their sidecars list no samples.
            whole_extra_bytes=typical_sidecar_bytes(samples=0),
        )

    def replay(self, node: int) -> PartReplay:
        """Replay the whole run on a node; return the node's cache at the end.

        Raises CapacityError.
        """
        from shardcache_client.reading.epochs.scattered_reader import RUNS_AHEAD
        from shardcache_client.reading.single.scattered_samples import MAX_ASKED, MAX_PLANNED

        run = self._run
        cache = PartReplay(run.manifest.shards.sizes, self._rules)
        budget = _AheadBudget(self._rules.capacity_bytes // AHEAD_DIVISOR)
        # A rank asks for the samples of the batch that it reads, and of the next batches.
        max_asked = min(MAX_ASKED, (1 + RUNS_AHEAD) * run.batch_size)
        readers: list[_SampleReader] = []
        for job in range(run.jobs):
            # Unless they run together, the jobs start at equal intervals within an epoch.
            idle_steps = 0
            if not run.start_together:
                idle_steps = job * self._samples_per_epoch // run.jobs
            for rank in self._ranks_of(node):
                ranges = self._ranges(job, rank)
                number = len(readers)
                reader = _SampleReader(
                    cache, ranges, idle_steps, budget, max_asked, MAX_PLANNED, number
                )
                readers.append(reader)

        # All readers go one step at a time, and drop out once they have read all of their samples.
        while readers:
            readers = [reader for reader in readers if reader.step()]
        return cache

    def first_batch_bytes(self, node: int) -> int:
        """Return the bytes that a node receives until each rank of the first job has a batch."""
        run = self._run
        # No object is fetched whole yet: only the parts with these samples are fetched.
        rules = replace(self._rules, max_share=1.0)
        cache = PartReplay(run.manifest.shards.sizes, rules)
        for rank in self._ranks_of(node):
            for sample_range in islice(self._ranges(0, rank), run.batch_size):
                asked = cache.ask(*sample_range)
                cache.read(asked)
        return cache.store_bytes

    def forecast(self, line_bytes_per_s: int, table: OriginTable) -> Json:
        """Return the forecast as JSON: fetches with and without a cache, disk space and time.

        Raises CapacityError.

        Args:
            line_bytes_per_s: bandwidth of each node's network.
            table: the [[origin]] table with the prices.
        """
        run = self._run
        caches = [self.replay(node) for node in range(run.nodes)]
        reads = sum(cache.asked for cache in caches)
        misses = sum(cache.misses for cache in caches)
        store_bytes = sum(cache.store_bytes for cache in caches)
        requests = sum(cache.requests for cache in caches)
        # Without a cache, each read fetches its sample, whose size is the mean of all samples.
        uncached_bytes = self._positions.all_bytes * reads // self._sample_count
        first_batch_bytes = max(map(self.first_batch_bytes, range(run.nodes)))
        return {
            "policies": {
                "shardcache": _figures(1 - misses / reads, store_bytes, requests, table),
                "none": _figures(0.0, uncached_bytes, reads, table),
            },
            "disk_bytes": max(cache.peak_bytes for cache in caches),
            "tier_disk_bytes": 0,
            "first_batch_s": first_batch_bytes / line_bytes_per_s,
        }

    def _ranks_of(self, node: int) -> range:
        """Return the numbers of a node's ranks, which are numbered node by node."""
        return range(node * self._run.ranks, (node + 1) * self._run.ranks)

    @property
    def _samples_per_epoch(self) -> int:
        """Number of samples of a rank in an epoch."""
        return self._sample_count // (self._run.nodes * self._run.ranks)

    def _ranges(self, job: int, rank: int) -> Iterator[_SampleRange]:
        """Yield the ranges of a rank's samples in all epochs, in the order of the dataset."""
        from shardcache_client.order.dealing.deal import SpanDeal
        from shardcache_client.order.dealing.deal_options import DealOptions
        from shardcache_client.order.rank_epoch import RankEpoch
        from shardcache_client.order.sequences.permutations import Shuffle
        from shardcache_client.order.topology import Topology

        run = self._run
        # The number of a job is its seed, too. A window of None permutes all samples.
        shuffle = Shuffle(job, window=None)
        deal = DealOptions(shuffle, batch_size=run.batch_size).deal(run.manifest)
        assert isinstance(deal, SpanDeal)  # the samples are counted
        topology = Topology(rank, run.nodes * run.ranks)
        for epoch in range(run.epochs):
            share = deal.share(epoch, topology)
            rank_epoch = RankEpoch(share, run.manifest)
            for shard, number in rank_epoch.samples(0, len(rank_epoch)):
                yield self._positions.range_of(shard, number)


def _figures(hit_share: float, store_bytes: int, requests: int, table: OriginTable) -> Json:
    """Return the figures of one policy, with the fields of `SimulatedRun.figures`.

    Args:
        hit_share: share of the reads that needed no fetch.
        store_bytes: bytes that the object store sent.
        requests: number of requests to the object store.
        table: the [[origin]] table with the prices.
    """
    return {
        "hits": hit_share,
        "store_bytes": store_bytes,
        "requests": requests,
        "between_nodes_bytes": 0,
        "cost": table.cost(store_bytes, requests),
    }
