"""Egress of 64 nodes that cache a part of the dataset each, the whole of it together, or each the whole.

`python -m benchmarks.downloads.egress` prints the table of docs/cluster.md. The deal and the ring are the real ones; a
node's cache is a set of shards that is filled in the order in which this epoch and the next need them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardcache.cluster.tier import Tier, Upstream, parse
from shardcache_client.order.deal import SampleDeal
from shardcache_client.order.rounds import Shuffle
from shardcache_client.topology import Topology
from support.cluster.ring import Ring, key_of

NODES = 64
SHARDS = 8192
SHARD_BYTES = 256 * 1024**2
PART_BYTES = 8 * 1024**2
STORE = "https://s3.eu-central-1.amazonaws.com"
EPOCHS = 10
RANKS = 8
WORKERS = 2
DOLLARS_PER_GB = 0.02
# Space that a node has for its part, over the part itself.
_SPACE = 1.25


@dataclass(frozen=True, slots=True)
class Bill:
    way: str  # contents of a node's disk
    disk_bytes: float  # disk space per node
    first: float  # bytes from the object store in the first epoch, as a multiple of the dataset
    later: float  # the same for each later epoch
    lan_bytes: float  # bytes that a node receives from other nodes per epoch

    @property
    def egress_bytes(self) -> float:
        return (self.first + (EPOCHS - 1) * self.later) * SHARDS * SHARD_BYTES

    def row(self) -> str:
        sizes = f"{self.disk_bytes / 1e9:,.0f} GB | {self.first:,.2f} | {self.later:,.2f}"
        lan = f"{self.lan_bytes / 1e9:,.1f} GB" if self.lan_bytes else "–"
        costs = f"{self.egress_bytes / 1e12:,.1f} TB | ${self.egress_bytes / 1e9 * DOLLARS_PER_GB:,.0f}"
        return f"| {self.way} | {sizes} | {costs} | {lan} |"


def bills(nodes: int) -> Iterator[Bill]:
    part_bytes, whole_bytes = _SPACE * SHARDS * SHARD_BYTES / nodes, SHARDS * SHARD_BYTES
    yield Bill("its part, shuffled over all shards", part_bytes, *_parts(nodes, groups=1), 0.0)
    yield Bill("its part, `canonical_nodes`", part_bytes, *_parts(nodes, groups=nodes), 0.0)
    fullest, received = _tier(nodes)
    yield Bill("the cluster's, with a tier", fullest * SHARD_BYTES, 1.0, 0.0, received * SHARD_BYTES)
    # Warmed; without, each node fetches what it needs until it has everything.
    yield Bill("the whole dataset", whole_bytes, float(nodes), 0.0, 0.0)


def _deal(groups: int) -> SampleDeal:
    counts = [950 + 37 * shard % 101 for shard in range(SHARDS)]
    return SampleDeal(counts, Shuffle(seed=1, window=16, groups=groups))


def _needed(deal: SampleDeal, epoch: int, node: int, nodes: int) -> set[int]:
    ranks = range(node * RANKS, (node + 1) * RANKS)
    readers = (Topology(rank, nodes * RANKS, worker, WORKERS) for rank in ranks for worker in range(WORKERS))
    return {shard for reader in readers for shard in deal.share(epoch, 0, reader).shards()}


def _fetched(nodes: int, *, groups: int, space: int, epochs: int = EPOCHS) -> list[float]:
    """Return the shards that all nodes fetch in each epoch, as a multiple of the dataset's."""
    deal, fetched = _deal(groups), Counter[int]()
    for node in range(nodes):
        cached: set[int] = set()
        for epoch in range(epochs):
            needed = _needed(deal, epoch, node, nodes)
            fetched[epoch] += len(needed - cached)
            cached = needed | set(sorted(cached - needed)[: max(0, space - len(needed))])
    return [fetched[epoch] / SHARDS for epoch in range(epochs)]


def _parts(nodes: int, *, groups: int) -> tuple[float, float]:
    first, *later = _fetched(nodes, groups=groups, space=int(_SPACE * SHARDS / nodes))
    return first, sum(later) / len(later)


def _tier(nodes: int) -> tuple[float, float]:
    """Return the shards' worth of parts of the node that owns most, and those that a node receives from others."""
    listed = parse(",".join(f"10.1.{number // 250}.{number % 250}" for number in range(nodes)))
    urls = [f"{STORE}/dataset/train-{shard:06d}.tar" for shard in range(SHARDS)]
    keys = [key_of(url, start, PART_BYTES) for url in urls for start in range(0, SHARD_BYTES, PART_BYTES)]
    fullest = Ring(Tier(nodes=listed, stores=(Upstream.parse(STORE),))).loads(keys).max() * SHARDS / nodes
    needed = _fetched(nodes, groups=1, space=0, epochs=1)[0] * SHARDS / nodes
    return fullest, needed * (nodes - 1) / nodes


def main() -> None:
    head = (
        "each node's disk holds | disk per node | × dataset, first epoch | each later one | "
        f"{EPOCHS} epochs | at ${DOLLARS_PER_GB:g} per GB | from other nodes, per node and epoch"
    )
    print(f"| {head} |", "|---|---|---|---|---|---|---|", *(bill.row() for bill in bills(NODES)), sep="\n")


if __name__ == "__main__":
    main()
