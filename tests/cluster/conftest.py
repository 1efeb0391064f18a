"""One cluster for all tests of a process: its store takes seconds to start, and to fill."""

import os
from collections.abc import Iterator

import pytest

from support.cluster.cluster import Cluster, why_not
from support.cluster.node import Dataset

MIB = 1024 * 1024


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A store and six hosts; in CI, root has to be able to make them."""
    why = why_not()
    if why is not None:
        (pytest.fail if "CI" in os.environ and os.geteuid() == 0 else pytest.skip)(why)
    with Cluster(6, "--part-size", "1MiB") as running:  # several parts per shard
        yield running


@pytest.fixture(scope="session")
def dataset(cluster: Cluster) -> Dataset:
    """A set of 24 shards of 2 MiB."""
    return cluster.store.fill("set", 24, 2 * MIB)


@pytest.fixture(scope="session")
def small(cluster: Cluster) -> Dataset:
    """A set of 8 shards of 2 MiB, for tests that fetch it many times."""
    return cluster.store.fill("small", 8, 2 * MIB)
