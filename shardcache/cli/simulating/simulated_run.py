"""A training run by its options: its reads in the real order, and the fetches of each policy.

`simulate` constructs a `SimulatedRun`. A read is the visit of a rank to a shard: the time from the
first of the shard's samples that the rank reads to the last. A policy decides which shards a node's
cache fetches and evicts: "shardcache" decides as the daemon does; "MIN", "LRU" and "none" are for
comparison. Time is counted in samples: a rank reads one sample per second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.errors import CapacityError
from shardcache.plan.replay import Read, Replay, Sizes, furthest_next, misses
from shardcache.shared.protocol import Json
from shardcache.shared.units import size

if TYPE_CHECKING:
    from shardcache_client.order.shards.manifest import Manifest
    from shardcache_client.order.share_places import Visit

NO_CACHE = "none"
POLICIES = ("shardcache", "MIN", "LRU", NO_CACHE)
_PART_BYTES = 8 * 1024 * 1024

# The layout of the drawing of hit rates, `hits.svg`. Its curves have a point for each step of the
# disk's size, up to a little more than all shards take.
_STEPS = 8
_MARGIN = 1.05
_LEFT = 60
_WIDTH = 600
_TOP = 50
_HEIGHT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A training run, by its options.

    Each rank reads one sample per second. Jobs begin together, or spread evenly over an epoch.

    Attributes:
        manifest: the dataset's shards, with sizes and sample counts.
        disk: capacity of each node's cache, in bytes.
        nodes: number of nodes.
        ranks: number of ranks of a job on each node.
        workers: number of processes of each rank.
        epochs: number of epochs of each job.
        jobs: number of jobs on the same nodes.
        together: True if the jobs begin at the same time.
        tier: True if the nodes have a tier, a cache that they share.
        shuffle: True if the dataset is shuffled.
        window: the dataset's `shuffle_window`.
        canonical_nodes: the dataset's `canonical_nodes`.
        batch_size: number of samples in a batch of each rank.
    """

    manifest: Manifest
    disk: int
    nodes: int
    ranks: int
    workers: int
    epochs: int
    jobs: int
    together: bool
    tier: bool
    shuffle: bool
    window: int
    canonical_nodes: int
    batch_size: int

    def size_bytes(self, shard: str) -> int:
        """Return the size of a shard, whose name is its number."""
        return self.manifest.shards.sizes[int(shard)]

    def reads(self, node: int) -> list[Read]:
        """Return the reads of all ranks of a node, in order of their times.

        The worker processes of a rank visit the same shards at nearly the same times, so they count
        as one read.
        """
        from shardcache_client.order.dealing.deal import SpanDeal
        from shardcache_client.order.dealing.deal_options import DealOptions
        from shardcache_client.order.rank_epoch import RankEpoch
        from shardcache_client.order.sequences.permutations import Shuffle
        from shardcache_client.order.topology import Topology

        world_size = self.nodes * self.ranks
        ranks = range(node * self.ranks, (node + 1) * self.ranks)
        # A rank may read one sample more than the mean. A pause as long as a batch follows each
        # epoch, so that the epochs of a job do not overlap.
        epoch_s = (self.manifest.samples or 0) / world_size + self.batch_size

        reads = list[Read]()
        for job in range(self.jobs):
            # The number of a job is its seed, too.
            shuffle = Shuffle(job, self.window, self.canonical_nodes) if self.shuffle else None
            deal = DealOptions(shuffle, batch_size=self.batch_size).deal(self.manifest)
            assert isinstance(deal, SpanDeal)  # the samples are counted
            delay_epochs = 0.0 if self.together else job / self.jobs
            for epoch in range(self.epochs):
                begin_s = epoch_s * (epoch + delay_epochs)
                # A session is a rank of a job. Sessions are numbered job by job, and rank by rank.
                for session, rank in enumerate(ranks, job * self.ranks):
                    topology = Topology(rank, world_size)
                    share = deal.share(epoch, topology)
                    visits = RankEpoch(share, self.manifest).visits()
                    reads += _reads_of(visits, session, epoch, begin_s)
        return sorted(reads)

    def process_reads(self, reads: Sequence[Read]) -> int:
        """Return the number of reads by all worker processes, given the reads of ranks.

        Each worker process visits all shards of its rank.
        """
        return len(reads) * self.workers

    def cached_bytes(self, shard: str) -> int:
        """Return the space that a shard takes in the cache, with its sidecar (its index there).

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
        """Return the shards that each policy fetches, and the maximum of the space in use.

        The space in use is measured for the policy "shardcache". Raises CapacityError.

        Args:
            reads: the reads of a node.
            disk_bytes: capacity of the node's cache.
        """
        self.check_largest(reads, disk_bytes)
        sizes = Sizes(reserved=self.reserved_bytes, cached=self.cached_bytes)
        ours = Replay(reads, disk_bytes, sizes)
        # `misses` evicts the highest rank first. For LRU, that has to be the earliest read, so the
        # ranks fall from read to read: 0, -1, -2 and so on.
        lru_ranks = range(0, -len(reads), -1)
        fetched = {
            "shardcache": ours.fetched,
            "MIN": list(misses(reads, furthest_next(reads), disk_bytes, sizes)),
            "LRU": list(misses(reads, lru_ranks, disk_bytes, sizes)),
            NO_CACHE: [read.shard for read in reads] * self.workers,
        }
        return fetched, ours.peak_bytes

    def check_largest(self, reads: Sequence[Read], disk_bytes: int) -> None:
        """Raise CapacityError if a node's disk cannot hold the largest shard that it reads."""
        largest = max({read.shard for read in reads}, key=self.reserved_bytes)
        reserved_bytes = self.reserved_bytes(largest)
        if reserved_bytes > disk_bytes:
            needed = size(reserved_bytes)
            available = size(disk_bytes)
            raise CapacityError(
                f"the shard takes {needed} while it is fetched, and a node's disk has {available}",
                url=self.manifest[int(largest)].url,
                remedy="raise --disk, or write smaller shards",
            )

    def first_batch_bytes(self, reads: Sequence[Read]) -> float:
        """Return the bytes that a node receives until each rank of the first job has a batch.

        All ranks receive at the same rate.
        """
        if not self.window:
            # Samples that are not shuffled are read from shards that are still arriving, so only
            # the bytes of the first batches have to arrive.
            sample_bytes = sum(self.manifest.shards.sizes) / (self.manifest.samples or 1)
            return float(self.ranks * self.batch_size * sample_bytes)
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

        has_tier = self.tier and policy != NO_CACHE
        sent_by_store = Counter(set(fetched)) if has_tier else fetched
        store_bytes = self._total_bytes(sent_by_store)
        requests = self.requests_without_bytes(policy, fetched.total(), read_count)
        for shard, times in sent_by_store.items():
            parts = math.ceil(self.size_bytes(shard) / _PART_BYTES)
            requests += times * parts
        between_nodes_bytes = 0
        if has_tier:
            share_of_others = 1 - 1 / self.nodes
            between_nodes_bytes = round(self._total_bytes(fetched) * share_of_others)
        table = table_of(Settings.load({}).origin, self.manifest[0].url)
        return {
            "hits": 1 - fetched.total() / read_count,
            "store_bytes": store_bytes,
            "requests": requests,
            "between_nodes_bytes": between_nodes_bytes,
            "cost": table.cost(store_bytes, requests),
        }

    def requests_without_bytes(self, policy: str, fetch_count: int, read_count: int) -> int:
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
        permissions = fetch_count if self.tier else 0
        return fetch_count + read_count + permissions

    def picture(self) -> str:
        """Return an SVG drawing of the first node's hit rates, by the size of its disk.

        The largest disk holds all shards that the node reads.
        """
        reads = self.reads(0)
        points = dict.fromkeys(POLICIES, "")
        max_bytes = _MARGIN * sum(map(self.cached_bytes, {read.shard for read in reads}))
        for step in range(1, _STEPS + 1):
            share = step / _STEPS
            with suppress(CapacityError):
                fetched_by_policy, _ = self.fetches(reads, int(max_bytes * share))
                for policy, fetched in fetched_by_policy.items():
                    miss_share = len(fetched) / self.process_reads(reads)
                    x = _LEFT + _WIDTH * share
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
        visits: the rank's visits to shards, in order.
        session: number of the rank's session.
        epoch: number of the epoch.
        begin_s: time at which the epoch begins.
    """
    for position, visit in enumerate(visits):
        start_s = begin_s + visit.first
        end_s = begin_s + visit.end
        yield Read(start_s, session, epoch, position, str(visit.shard), end_s)
