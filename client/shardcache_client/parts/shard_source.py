"""Source of a dataset's shards: its urls, and the daemon that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import resolve
from shardcache_client.daemon.session_pool import SessionPool
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.parts.dataset_parts import DatasetParts, DealtSamples
from shardcache_client.ranks.group import RankGroup
from shardcache_client.samples.token_blocks import TokenBlocks


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The shards that urls name, read through a daemon.

    Attributes:
        urls: urls as the user gave them.
        daemon: the daemon that reads the shards.
        job: name of the job in `shardcache status`.
        timeout_s: maximum time to wait for the daemon, and for a shard.
        partial_reads: True to read shards that are still being downloaded.
    """

    urls: Sequence[str]
    daemon: DaemonChoice
    job: str
    timeout_s: float
    partial_reads: bool

    def manifest(self, group: RankGroup, tokens: TokenBlocks | None = None) -> Manifest:
        """Return the shards of the dataset, the same on all ranks of a group.

        Raises the errors of resolving the urls.

        Args:
            group: the ranks, which may agree on the shards that one of them has resolved.
            tokens: the blocks of tokens that are samples; None for the samples of the tars.
        """
        group.refuse_resharding()
        manifest = group.agree_on_manifest(self._resolved)
        if tokens is not None:
            manifest = manifest.of_blocks(tokens.count)
        return manifest

    def _resolved(self) -> Manifest:
        """Return the shards to which the daemon resolves the urls."""
        return resolve(self.daemon, ReaderIdentity(self.job), list(self.urls), self.timeout_s)

    def parts(self, samples: DealtSamples, group: RankGroup) -> DatasetParts:
        """Return the parts of a dataset of these shards that yields its samples as they are."""
        patience = Patience(self.timeout_s)
        sessions = SessionPool(self.daemon, patience, partial_reads=self.partial_reads)
        return DatasetParts(
            urls=self.urls,
            samples=samples,
            group=group,
            sessions=sessions,
            job=self.job,
        )
