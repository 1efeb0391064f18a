"""`cached_paths`: local paths of cached shards, for libraries that read tar files themselves."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardcache.protocol import patterns_from_here
from shardcache_client.arguments import DAEMONS, OTHER_WORDS, PATH, SECONDS, TEXT, URLS, checked
from shardcache_client.daemon.choice import DaemonChoice, Patience, Which
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.order.manifest import Plan
from shardcache_client.reading.leased_shard import ShardWindow
from shardcache_client.topology import job_name


@checked(OTHER_WORDS, urls=URLS, job=TEXT.or_none(), socket=PATH.or_none(), daemon=DAEMONS, timeout_s=SECONDS)
@contextmanager
def cached_paths(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    job: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    daemon: Which = "auto",
    timeout_s: float = 300.0,
) -> Iterator[list[str]]:
    """Fetch shards and hold them in the cache until the `with` block ends; yields their paths, in the order of `urls`.

    For libraries that read tar files themselves. The block begins once every shard is on local disk, verified and, if
    it was compressed, inflated:

        with cached_paths("s3://bucket/val-{000..099}.tar") as paths:
            dataset = load_dataset("webdataset", data_files=paths, split="train", streaming=True)

    The files are read-only. Other processes of the node may read them, too, as long as this one is in the block: the
    shards stay cached, also across a restart of the daemon, and are released when the block or the process ends. All of
    them must fit into the cache at the same time; two file descriptors are open per shard.

    Args:
        urls: as for `ShardDataset`.
        job: name of this job in `shardcache status`. Default: as for `ShardDataset`.
        socket, daemon: as for `ShardDataset`.
        timeout_s: how long to wait for each shard, or for a lost daemon to come back.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be used.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: `urls` cannot be resolved, or a shard cannot be
            fetched.
        ShardError: a shard is damaged, or not a tar.
        CapacityError: the shards do not fit into the cache, in addition to those that other jobs hold.
        ShardTimeoutError: a shard did not arrive in time.
        CacheDirError: this process cannot read the cache folder.
    """
    choice, reader = DaemonChoice.of(socket, daemon), ReaderIdentity(job or job_name())
    patterns = patterns_from_here(urls)
    manifest = resolve(choice, reader, patterns, timeout_s)
    session = Session(choice, reader, Patience(timeout_s))
    window = ShardWindow(session, len(manifest), partial=False)
    try:
        session.declare(Plan.of(manifest, 0, range(len(manifest)), ()))
        yield [_next_path(window, number) for number in range(len(manifest))]
    finally:
        window.empty()
        session.close()


def _next_path(window: ShardWindow, number: int) -> str:
    """Wait for the next shard and keep it mapped: a file that is in use stays cached, even without a lease."""
    leased_shard = window.take(number, None)
    leased_shard.open()
    return str(leased_shard.whole.path)
