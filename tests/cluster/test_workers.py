"""Workers of an owner's nginx that end, hang or are replaced, while nodes fetch slowly."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from support.cluster.cluster import MBIT_PER_S, Cluster, Round
from support.cluster.node import Dataset, Node
from support.cluster.tier import Nginx, Tier
from support.programs.processes import wait_until_ended

pytestmark = pytest.mark.slow

# Parts take longer than the time after which an owner is asked about them.
LINK_MBIT_PER_S = 20
PARTS = ("--part-size", "1MiB")
LIMIT_S = 120.0
"""Some five times a fetch without faults. With them, it took longer, or did not end."""
SENT = 1.5
"""Sizes of the dataset: one worker's transfers are sent again. Without a tier, it is three."""


@contextmanager
def midway(cluster: Cluster, dataset: Dataset) -> Iterator[tuple[list[Node], Tier, Round]]:
    """Three nodes with a tier, that have fetched a third of a dataset over a narrow link."""
    cluster.store.host.limit(LINK_MBIT_PER_S)
    try:
        with (
            cluster.tiered(3, *PARTS) as (nodes, tier),
            cluster.fetching(nodes, dataset) as round_,
        ):
            try:
                round_.wait_until_midway(nodes[0])
                yield nodes, tier, round_
            finally:
                for node in nodes:
                    node.daemon.kill()
    finally:
        cluster.store.host.limit(MBIT_PER_S)


def busiest_worker(nginx: Nginx) -> int:
    """Return the worker that has used the most processor time, and so likely has transfers."""
    return max(nginx.workers(), key=lambda pid: sum(psutil.Process(pid).cpu_times()[:2]))


@contextmanager
def stopped(worker: int) -> Iterator[None]:
    """A worker that hangs, as in a read of a bad disk."""
    os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker, signal.SIGCONT)


def test_a_hung_worker_holds_up_nobody(cluster: Cluster, dataset: Dataset) -> None:
    """Its transfers are those of other workers soon, and requests that it took are sent again."""
    with midway(cluster, dataset) as (nodes, tier, round_), stopped(busiest_worker(tier[nodes[2]])):
        round_.check(nodes, limit_s=LIMIT_S)
        assert round_.sent() <= SENT


def test_a_killed_workers_transfers_are_taken_over(cluster: Cluster, dataset: Dataset) -> None:
    """Nobody waits for its locks to age, and the store sends little more than it had in flight."""
    with midway(cluster, dataset) as (nodes, tier, round_):
        worker = busiest_worker(tier[nodes[2]])
        os.kill(worker, signal.SIGKILL)
        wait_until_ended(worker)
        round_.check(nodes, limit_s=LIMIT_S)
        assert round_.sent() <= SENT


def renewed(nodes: list[Node], tier: Tier) -> None:
    """Renew all certificates."""
    tier.form(nodes)


def rewritten(nodes: list[Node], tier: Tier) -> None:
    """Rewrite the list six times."""
    for _ in range(6):
        tier.form(nodes)


@pytest.mark.parametrize("change", [renewed, rewritten])
def test_transfers_outlive_a_reload(
    cluster: Cluster, dataset: Dataset, change: Callable[[list[Node], Tier], None]
) -> None:
    """Repeated reloads of nginx neither fail transfers under way nor send them again.

    Were it lost, two parts of three would fail on each node, and be sent again. On a busy machine,
    some seem late.
    """
    with midway(cluster, dataset) as (nodes, tier, round_):
        change(nodes, tier)
        round_.check(nodes, limit_s=LIMIT_S)
        assert round_.sent() <= SENT
        assert sum(node.daemon.status()["counters"]["tier_failures"] for node in nodes) < len(
            dataset
        )
