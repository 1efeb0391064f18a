"""The bytes that leave the store for nodes that share what they fetch, and for nodes that do not.

A daemon fetches parts that seem late once more, and an owner that gets no processor for seconds is
late: on a busy machine, copies are some more than on a quiet one. The bounds are far from both what
is right and what is wrong.
"""

import pytest

from support.cluster.cluster import MBIT_PER_S, Cluster
from support.cluster.node import Dataset, empty

pytestmark = pytest.mark.slow

# In copies of a dataset.
ABOUT_ONE = 1.5
"""Nodes that do not share send for two at the least."""
FEW = 0.15
"""Less than the share of one node of four."""


def test_the_store_sends_everything_once_per_node_without_a_tier(
    cluster: Cluster, small: Dataset
) -> None:
    """The point of a tier; it also shows that bytes are counted."""
    with cluster.nodes(3) as nodes:
        assert cluster.fetch(nodes, small) == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_any_number_of_nodes_costs_one_copy(cluster: Cluster, small: Dataset, count: int) -> None:
    """The store sends each byte once."""
    with cluster.tiered(count) as (nodes, _):
        assert 0.99 <= cluster.fetch(nodes, small) <= ABOUT_ONE


def test_a_narrow_link_to_the_store_costs_one_copy(cluster: Cluster, dataset: Dataset) -> None:
    """Parts take longer than the stall time-out; nodes wait, because the owners live.

    If they did not, each part would fail on each node, and three copies would be sent.
    """
    cluster.store.host.limit(10)
    flags = (
        "--part-size",
        "4MiB",
        "--max-connections",
        str(len(dataset)),
        "--max-transfers",
        str(len(dataset)),
    )
    try:
        with cluster.tiered(3, *flags) as (nodes, _):
            assert 0.99 <= cluster.fetch(nodes, dataset) <= 2
            failures = sum(node.daemon.status()["counters"]["tier_failures"] for node in nodes)
            assert failures < len(dataset)
    finally:
        cluster.store.host.limit(MBIT_PER_S)


def test_evicted_shards_come_from_the_tier_which_survives_kill_9(
    cluster: Cluster, dataset: Dataset
) -> None:
    """Nodes with emptied caches fetch nothing from the store, even after SIGKILL to all nginx."""
    with cluster.tiered(3) as (nodes, tier):
        cluster.fetch(nodes, dataset)
        empty(nodes)
        assert cluster.fetch(nodes, dataset) <= FEW
        empty(nodes)
        for node in nodes:
            tier[node].kill()
        for node in nodes:
            tier[node].start()
        assert cluster.fetch(nodes, dataset) <= FEW


def test_a_node_that_joins_fetches_its_share_and_leaves_for_nothing(
    cluster: Cluster, dataset: Dataset
) -> None:
    """A fourth node takes over a quarter of the parts. The others still have them afterwards."""
    with cluster.tiered(4) as (nodes, tier):
        tier.form(nodes[:3])
        cluster.fetch(nodes[:3], dataset)
        tier.form(nodes)
        empty(nodes)
        assert 0.1 <= cluster.fetch(nodes, dataset) <= 0.6
        tier.form(nodes[:3])
        empty(nodes)
        assert cluster.fetch(nodes[:3], dataset) <= FEW
