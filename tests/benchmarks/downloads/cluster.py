"""A cold epoch on the nodes of a cluster: each for itself, and with a tier before the store.

All nodes fetch the same shards in the same order at the same time, by `shardcache warm`; the
store's link is narrow. The store, the nodes and the link share this machine's processors: bytes
carry over to other machines, seconds do not.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.data import LARGE
from benchmarks.measure import Row, Target, interleaved, median_of, tree_cpu_s
from benchmarks.workplace import Workplace, settle
from support.cluster.cluster import MBIT_PER_S, Cluster, why_not
from support.cluster.node import Dataset, Node

NODES = 3
SHARDS = 16

ALONE = "no tier"
MTLS = "tier, mTLS"
PLAIN = "tier, plain"


@dataclass(frozen=True, slots=True)
class Epoch:
    wall_s: float  # until every node had every shard
    copies: float  # of the dataset that the store has sent
    cpu_s_per_gb: float  # processor time of the tier's programs per gigabyte that the nodes got

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s, {self.copies:.3f} copies, {self.cpu_s_per_gb:.2f} CPU-s/GB"


def measure(place: Workplace) -> list[Row]:
    """Return medians: wall time, copies sent by the store, and processor time of the tier."""
    why = why_not()
    if why is not None:
        place.say(f"no cluster, its rows are left out: {why}")
        return []
    with Cluster(NODES, "--capacity", "100GB", root=place.root) as cluster:
        shards = place.dataset(LARGE).shards[:SHARDS]
        place.say(f"uploading {len(shards)} shards to the cluster's store")
        dataset = cluster.store.copy("cluster", shards)
        contenders = {
            ALONE: partial(_alone, cluster, dataset),
            MTLS: partial(_tiered, cluster, dataset, tls=True),
            PLAIN: partial(_tiered, cluster, dataset, tls=False),
        }
        tries = interleaved(contenders, place.say, place.rounds)
    wall_s, copies, cpu = (
        median_of(tries, figure) for figure in ("wall_s", "copies", "cpu_s_per_gb")
    )
    epoch = f"for a cold epoch, {NODES} nodes, store link {MBIT_PER_S} Mbit/s"
    return [
        Row("s", epoch, wall_s[MTLS], ALONE, wall_s[ALONE], Target("≤", 0.7)),
        Row("s", epoch, wall_s[MTLS], PLAIN, wall_s[PLAIN]),
        Row("copies", "of the dataset that the store sends", copies[MTLS], ALONE, copies[ALONE]),
        Row("CPU-s/GB", "of the tier", cpu[MTLS], PLAIN, cpu[PLAIN]),
    ]


def _alone(cluster: Cluster, dataset: Dataset) -> Epoch:
    with cluster.nodes(NODES) as nodes:
        return _epoch(cluster, nodes, dataset, [])


def _tiered(cluster: Cluster, dataset: Dataset, *, tls: bool) -> Epoch:
    with cluster.tiered(NODES, tls=tls) as (nodes, tier):
        return _epoch(cluster, nodes, dataset, [tier[node].pid for node in nodes])


def _epoch(cluster: Cluster, nodes: Sequence[Node], dataset: Dataset, pids: Sequence[int]) -> Epoch:
    settle()
    before_s = sum(map(tree_cpu_s, pids))
    started_s = time.perf_counter()
    with cluster.fetching(nodes, dataset) as round_:
        round_.wait()
        wall_s = time.perf_counter() - started_s
        cpu_s = sum(map(tree_cpu_s, pids)) - before_s
        copies = round_.sent()
        round_.check(nodes)
    return Epoch(wall_s, copies, cpu_s / (len(nodes) * dataset.size_bytes / 1e9))
