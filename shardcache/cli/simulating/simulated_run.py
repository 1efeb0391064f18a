"""A simulated training run: its reads in the real order, and the fetches of each policy.

`simulate` constructs a `SimulatedRun` from its options. A read is the visit of a rank to a shard:
the time from the first of the shard's samples that the rank reads to the last. Time is simulated,
too: a rank reads one sample per second. The client's deal assigns the samples of an epoch to ranks;
a share is what one rank gets.

A policy decides which shards a node's cache fetches and evicts: "shardcache" decides as the daemon
does; "MIN", "LRU" and "none" are for comparison. The cache keeps a shard with its sidecar, a file
with the shard's index.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.plan.replay import Read, Replay, Sizes, furthest_next, misses
from shardcache.shared.exceptions import CapacityError
from shardcache.shared.protocol import Json
from shardcache.shared.units import size

if TYPE_CHECKING:
    from shardcache_client.order.dealing.deal import SpanDeal
    from shardcache_client.order.shards.manifest import Manifest
    from shardcache_client.order.share_places import Visit

NO_CACHE = "none"
POLICIES = ("shardcache", "MIN", "LRU", NO_CACHE)
_PART_BYTES = 8 * 1024 * 1024  # number of bytes of a shard that one request fetches

# In the drawing of hit rates, the curves have a point for each of several disk sizes. The largest
# disk is a little larger than all shards together.
_DISK_SIZES = 8
_MARGIN = 1.05
# Layout of the drawing, as in `hits.svg`.
_LEFT = 60
_WIDTH = 600
_TOP = 50
_HEIGHT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """The options of a training run, and what it reads and fetches.

    Attributes:
        manifest: the dataset's shards, with sizes and sample counts.
        disk_bytes: capacity of each node's cache.
        nodes: number of nodes.
        ranks: number of ranks of a job on each node.
        workers: number of processes of each rank.
        epochs: number of epochs of each job.
        jobs: number of jobs on the same nodes.
        start_together: True if the jobs begin at the same time; False if they are spread evenly
            over an epoch.
        has_tier: True if the nodes have a tier, a cache that they share.
        is_shuffled: True if the dataset is shuffled.
        window: the dataset's `shuffle_window`.
        canonical_nodes: the dataset's `canonical_nodes`.
        batch_size: number of samples in a batch of each rank.
    """

    manifest: Manifest
    disk_bytes: int
    nodes: int
    ranks: int
    workers: int
    epochs: int
    jobs: int
    start_together: bool
    has_tier: bool
    is_shuffled: bool
    window: int
    canonical_nodes: int
    batch_size: int

    def reads(self, node: int) -> list[Read]:
        """Return the reads of all ranks of a node, in order of their times.

        The worker processes of a rank visit the same shards at nearly the same times, so they count
        as one read.
        """
        from shardcache_client.order.rank_epoch import RankEpoch
        from shardcache_client.order.topology import Topology

        world_size = self.nodes * self.ranks
        ranks = range(node * self.ranks, (node + 1) * self.ranks)
        # A rank may read one sample more than the mean. A pause as long as a batch follows each
        # epoch, so that the epochs of a job do not overlap.
        epoch_s = (self.manifest.samples or 0) / world_size + self.batch_size

        reads = list[Read]()
        for job in range(self.jobs):
            deal = self._deal(job)
            delay_epochs = 0.0 if self.start_together else job / self.jobs
            for epoch in range(self.epochs):
                begin_s = epoch_s * (epoch + delay_epochs)
                # A session is a rank of a job. Sessions are numbered job by job, and rank by rank.
                for session, rank in enumerate(ranks, job * self.ranks):
                    topology = Topology(rank, world_size)
                    share = deal.share(epoch, topology)
                    visits = RankEpoch(share, self.manifest).visits()
                    reads += _reads_of(visits, session, epoch, begin_s)
        return sorted(reads)

    def _deal(self, job: int) -> SpanDeal:
        """Return the deal of a job, whose number is its seed, too."""
        from shardcache_client.order.dealing.deal import SpanDeal
        from shardcache_client.order.dealing.deal_options import DealOptions
        from shardcache_client.order.sequences.permutations import Shuffle

        shuffle = None
        if self.is_shuffled:
            shuffle = Shuffle(job, self.window, self.canonical_nodes)
        deal = DealOptions(shuffle, batch_size=self.batch_size).deal(self.manifest)
        assert isinstance(deal, SpanDeal)  # the samples are counted
        return deal

    def process_reads(self, reads: Sequence[Read]) -> int:
        """Return the number of reads by all worker processes, given the reads of ranks.

        Each worker process visits all shards of its rank.
        """
        return len(reads) * self.workers

    def size_bytes(self, shard: str) -> int:
        """Return the size of a shard, whose name is its number."""
        return self.manifest.shards.sizes[int(shard)]

    def cached_bytes(self, shard: str) -> int:
        """Return the space that a shard takes in the cache, with its sidecar.

        The sidecar is given a typical size, since an index file does not say how many members a
        sample has.
        """
        from shardcache.store.space import typical_sidecar_bytes

        samples = self.manifest.shards.samples[int(shard)]
        return self.size_bytes(shard) + typical_sidecar_bytes(samples)

    def reserved_bytes(self, shard: str) -> int:
        """Return the space that the daemon reserves for a shard before it fetches it."""
        from shardcache.store.space import footprint_bytes

        # If a shard has many tiny samples, the daemon enlarges the reservation for its sidecar.
        return max(footprint_bytes(self.size_bytes(shard)), self.cached_bytes(shard))

    def fetches(self, reads: Sequence[Read], disk_bytes: int) -> tuple[dict[str, list[str]], int]:
        """Return the shards that each policy fetches, and the most space that "shardcache" uses.

        A shard is listed once for each fetch. The space is in bytes. Raises CapacityError.

        Args:
            reads: the reads of a node.
            disk_bytes: capacity of the node's cache.
        """
        self._check_largest(reads, disk_bytes)
        sizes = Sizes(reserved=self.reserved_bytes, cached=self.cached_bytes)
        replay = Replay(reads, disk_bytes, sizes)
        # `misses` evicts the shard whose last read has the highest number. For LRU, that has to be
        # the earliest read, so the numbers fall from read to read: 0, -1, -2 and so on.
        lru_order = range(0, -len(reads), -1)
        fetched = {
            "shardcache": replay.fetched,
            "MIN": list(misses(reads, furthest_next(reads), disk_bytes, sizes)),
            "LRU": list(misses(reads, lru_order, disk_bytes, sizes)),
            NO_CACHE: [read.shard for read in reads] * self.workers,
        }
        return fetched, replay.peak_bytes

    def _check_largest(self, reads: Sequence[Read], disk_bytes: int) -> None:
        """Raise CapacityError if a node's disk cannot hold the largest shard that it reads."""
        largest = max({read.shard for read in reads}, key=self.reserved_bytes)
        reserved_bytes = self.reserved_bytes(largest)
        if reserved_bytes > disk_bytes:
            raise CapacityError(
                f"the shard takes {size(reserved_bytes)} while it is fetched, "
                f"and a node's disk has {size(disk_bytes)}",
                url=self.manifest[int(largest)].url,
                remedy="raise --disk, or write smaller shards",
            )

    def first_batch_bytes(self, reads: Sequence[Read]) -> float:
        """Return the bytes that a node receives until each rank of the first job has a batch.

        The shards of all ranks are taken to arrive at the same rate.
        """
        if not self.window:
            # Samples that are not shuffled are read from shards that are still arriving, so only
            # the bytes of the first batches have to arrive.
            mean_sample_bytes = sum(self.manifest.shards.sizes) / (self.manifest.samples or 1)
            return float(self.ranks * self.batch_size * mean_sample_bytes)
        first_shards = set()
        for read in reads:
            is_of_first_job = read.session < self.ranks
            is_of_first_batch = read.start_s < self.batch_size  # a rank reads a sample per second
            if is_of_first_job and is_of_first_batch:
                first_shards.add(read.shard)
        return sum(map(self.size_bytes, first_shards))

    def figures(self, policy: str, fetched: Counter[str], read_count: int) -> Json:
        """Return the figures of a policy.

        With a tier, the store sends each shard once, and each node owns an equal share of the
        shards.

        Args:
            policy: one of `POLICIES`.
            fetched: for each shard, the number of times that the nodes fetched it.
            read_count: number of reads by all processes.
        """
        from shardcache.config.origin_table import table_of
        from shardcache.config.settings import Settings

        sent_by_store = fetched
        between_nodes_bytes = 0
        if self.has_tier and policy != NO_CACHE:
            sent_by_store = Counter(set(fetched))  # each shard once
            share_of_others = 1 - 1 / self.nodes
            between_nodes_bytes = round(self._total_bytes(fetched) * share_of_others)
        store_bytes = self._total_bytes(sent_by_store)
        requests = self._requests_without_bytes(policy, fetched.total(), read_count)
        for shard, times in sent_by_store.items():
            parts = math.ceil(self.size_bytes(shard) / _PART_BYTES)
            requests += times * parts
        table = table_of(Settings.load({}).origin, self.manifest[0].url)
        return {
            "hits": 1 - fetched.total() / read_count,
            "store_bytes": store_bytes,
            "requests": requests,
            "between_nodes_bytes": between_nodes_bytes,
            "cost": table.cost(store_bytes, requests),
        }

    def _requests_without_bytes(self, policy: str, fetch_count: int, read_count: int) -> int:
        """Return the maximum number of requests that bring no bytes of shards.

        A daemon asks for a shard's version when it fetches the shard, and again when a reader gets
        the shard, unless it has asked within `--listing-ttl-s`. The tier asks the store whether a
        node may read a shard, unless a node with the same access key was permitted to read it
        within `--trust-s`.

        Args:
            policy: one of `POLICIES`.
            fetch_count: number of fetches by all nodes.
            read_count: number of reads by all processes.
        """
        if policy == NO_CACHE:
            return read_count
        permission_requests = fetch_count if self.has_tier else 0
        return fetch_count + read_count + permission_requests

    def picture(self) -> str:
        """Return an SVG drawing of the first node's hit rates, by the size of its disk.

        The largest disk holds all shards that the node reads.
        """
        reads = self.reads(0)
        shards = {read.shard for read in reads}
        max_bytes = _MARGIN * sum(map(self.cached_bytes, shards))
        points = dict.fromkeys(POLICIES, "")  # of each curve, as SVG: "x,y x,y "
        for number in range(1, _DISK_SIZES + 1):
            disk_share = number / _DISK_SIZES
            try:
                fetched_by_policy, _ = self.fetches(reads, int(max_bytes * disk_share))
            except CapacityError:
                continue  # the curves begin at the first disk that is large enough
            for policy, fetched in fetched_by_policy.items():
                miss_share = len(fetched) / self.process_reads(reads)
                x = _LEFT + _WIDTH * disk_share
                y = _TOP + _HEIGHT * miss_share
                points[policy] += f"{x:.0f},{y:.1f} "
        # The drawing has a placeholder for each policy's points, and one for each of the sizes that
        # label its axis: at one, two and four quarters of its width.
        labels = {f"quarter{number}": size(max_bytes * number / 4) for number in (1, 2, 4)}
        drawing = Path(__file__).with_name("hits.svg").read_text()
        return drawing.format(**points, **labels)

    def _total_bytes(self, fetched: Counter[str]) -> int:
        """Return the size of all fetches, given the number of fetches of each shard."""
        return sum(times * self.size_bytes(shard) for shard, times in fetched.items())


def _reads_of(
    visits: Iterable[Visit],
    session: int,
    epoch: int,
    begin_s: float,
) -> Iterator[Read]:
    """Yield the reads of a rank in an epoch.

    Args:
        visits: the rank's visits to shards, in order, by the numbers of samples in the epoch.
        session: number of the rank's session.
        epoch: number of the epoch.
        begin_s: time at which the epoch begins.
    """
    for position, visit in enumerate(visits):
        start_s = begin_s + visit.first
        end_s = begin_s + visit.end
        yield Read(start_s, session, epoch, position, str(visit.shard), end_s)
