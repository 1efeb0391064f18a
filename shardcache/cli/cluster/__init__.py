"""`shardcache cluster`: a cache that the nodes of a cluster share, in front of the object stores."""

from __future__ import annotations

import click

from shardcache.cli.cluster.certificates import certificates
from shardcache.cli.cluster.cluster_status import status
from shardcache.cli.cluster.render import render
from shardcache.cli.cluster.run import run
from shardcache.cli.common import Family


@click.group(
    cls=Family,
    commands=[render, certificates, run, status],
    short_help="Share the nodes' caches, so that a cluster fetches a shard once.",
)
def cluster() -> None:
    """Set up and watch the tier: a cache that the nodes of a cluster share, so that each shard is fetched once.

    nginx on each node is the tier. `[[origin]] tier = "127.0.0.1:9080"` has the daemon use it. docs/cluster.md
    explains how to set it up.
    """
