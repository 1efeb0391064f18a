"""Faults of the tier's nodes, links and programs: bytes are right, and few are sent again."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from support.cluster.cluster import Cluster
from support.cluster.node import Dataset, Node, empty
from support.cluster.tier import Tier

pytestmark = pytest.mark.slow

# A stall is noticed sooner than by default, and fetching the dataset takes seconds, however fast
# the machine is.
PATIENCE_S = 10.0
SLOWLY = ("--max-bandwidth", "8MB", "--max-connections", "3")
FAST_MBIT_PER_S = 10_000
MORE_S = 60.0
"""The time that a fault may cost."""
AGAIN = 1.5
"""Times that the store sends what a lost node had: once, and more on a busy machine."""
IN_FLIGHT = 0.05
"""Bytes on their way to a lost node, and heads of answers."""


@contextmanager
def killed(node: Node, tier: Tier) -> Iterator[None]:
    """A node that has died: its daemon and its nginx."""
    node.daemon.kill()
    tier[node].kill()
    yield


@contextmanager
def unplugged(node: Node, _tier: Tier) -> Iterator[None]:
    """A node whose packets are all lost."""
    with node.host.unplugged():
        yield


@pytest.mark.parametrize("loss", [killed, unplugged])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_a_node_is_lost(
    cluster: Cluster,
    dataset: Dataset,
    loss: Callable[[Node, Tier], AbstractContextManager[None]],
    state: str,
) -> None:
    """The others finish, and the store sends again only what the lost node had."""
    with cluster.tiered(3, *SLOWLY, stall_timeout_s=PATIENCE_S) as (nodes, tier):
        *others, lost = nodes
        base_s = seconds(lambda: cluster.fetch(nodes, dataset))
        if state == "cold":
            tier.form([])
            tier.form(nodes)
        empty(nodes)
        with cluster.fetching(nodes, dataset) as round_:
            try:
                round_.wait_until_midway(nodes[0])
                with loss(lost, tier):
                    had = sum(path.stat().st_size for path in tier.files(lost)) / dataset.size_bytes
                    round_.check(others, limit_s=base_s + MORE_S)
                    sent = round_.sent()
            finally:
                lost.daemon.kill()
    assert 0.05 < had < 0.4
    assert sent <= (state == "cold") + AGAIN * had + IN_FLIGHT


def test_an_owner_behind_a_slow_link_is_left_out(cluster: Cluster, dataset: Dataset) -> None:
    """The others find out within seconds, and get its shards from the store and each other."""
    with cluster.tiered(3) as (nodes, tier):
        *others, slow = nodes
        tier.form(others)
        base_s = seconds(lambda: cluster.fetch(others, dataset))
        empty(others)
        tier.form([])
        tier.form(nodes)
        slow.host.limit(1)
        try:
            with cluster.fetching(others, dataset) as round_:
                round_.check(others, limit_s=base_s + MORE_S)
                assert round_.sent() <= 1.6
        finally:
            slow.host.limit(FAST_MBIT_PER_S)


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started_s = time.monotonic()
    function()
    return time.monotonic() - started_s
