"""Writing of a sample table: a tar with the keys, sizes, places and metadata of all samples.

The place of a sample is where its bytes are in the shard. `shardcache index --samples` calls
`write_table`, which reads the shards as a training job would: a session with the daemon declares a
plan, all shards in order; the daemon prefetches them into the cache, and a window leases one shard
after another, so that it is not evicted while it is read. The daemon has indexed the cached shards,
and the table's rows are made of these indexes. A `ShardRef` is a shard's url, version and counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.formats.tar import TAR
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.contents import read_metadata, rows_of
from shardcache.shared.tarindex.named_members import MetadataMember
from shardcache.shared.tarindex.spans import blocks_of
from shardcache.shared.urls.url_names import is_stored_as_is
from shardcache.writing.sample_tar import END, table_part
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.shard_window import ShardWindow

_JOB = "shardcache index"  # name of the command's job in the daemon's status
_TIMEOUT_S = 300.0


def write_table(
    urls: Sequence[str],
    socket: Path | None,
    file: IO[bytes],
    metadata: MetadataMember | None,
    show: Callable[[dict[str, Any]], object],
) -> list[ShardRef]:
    """Write the table of the shards' current versions; return the shards, each url once.

    Raises the errors of a dataset, and MetadataError.

    Args:
        urls: urls or patterns of the shards, as for a dataset.
        socket: path of the daemon's socket; None for the default socket.
        file: the file to write the table to.
        metadata: the member that holds each sample's metadata; None for a table without metadata.
        show: called with an event for each shard.
    """
    choice = DaemonChoice.of(socket)
    reader = ReaderIdentity(_JOB)
    listed_refs = {ref.url: ref for ref in resolve(choice, reader, urls, _TIMEOUT_S)}
    sizes = [ref.size_bytes for ref in listed_refs.values()]
    total_bytes = sum(size or 0 for size in sizes)
    is_total_known = None not in sizes
    # The listed versions are left out, since the table describes the versions that are current when
    # the shards are read.
    manifest = Manifest.of(map(ShardRef, listed_refs))
    plan = Plan.of(manifest, epoch=0, now=range(len(listed_refs)))
    session = Session(choice, reader, Patience(_TIMEOUT_S))
    window = ShardWindow(session, plan, partial=False)
    refs: list[ShardRef] = []
    done_bytes = 0
    try:
        session.declare(plan)
        for number, size_bytes in enumerate(sizes):
            refs.append(_add_shard(file, number, window, metadata))
            done_bytes += size_bytes or 0
            show(
                {
                    "event": "progress",
                    "done_shards": number + 1,
                    "done_bytes": done_bytes,
                    "shards": len(listed_refs),
                    "total_bytes": total_bytes if is_total_known else None,
                },
            )
        file.write(END)
    finally:
        window.empty()
        session.close()
    return refs


def _add_shard(
    file: IO[bytes],
    number: int,
    window: ShardWindow,
    member: MetadataMember | None,
) -> ShardRef:
    """Add the rows of the next shard to the table; return the shard, with its version.

    Args:
        file: the file of the table.
        number: number of the shard in the plan.
        window: leases the shards of the plan.
        member: the member with each sample's metadata; None for a table without metadata.
    """
    leased_shard = window.take(number, count=None)  # the number of samples is not known yet
    leased_shard.open()
    try:
        shard = leased_shard.whole
        index = shard.index
        header = index.header
        url = header["url"]
        metadata = None
        if member is not None:
            metadata = read_metadata(index, shard.tar, member, url)
        # The table has the places of samples only if they are places in the object itself: the
        # shard is a tar, and the cached file has the object's bytes.
        blocks = None
        is_tar = header.get("content", TAR.name) == TAR.name
        if is_tar and is_stored_as_is(url):
            blocks = blocks_of(index, shard.tar, url)
        rows = rows_of(index, metadata, blocks=blocks)
        file.writelines(table_part(number, header["version"], rows))
        return ShardRef(url, header["version"], header["origin_bytes"], len(shard))
    finally:
        window.give_back(leased_shard)


def check_same(listed: Sequence[ShardRef], indexed: Sequence[ShardRef]) -> None:
    """Raise ConfigError unless a table lists the same versions of the same shards as an index.

    Args:
        listed: the shards of the table.
        indexed: the shards of the index, which were read after the table's.
    """
    if [ref.version for ref in listed] != [ref.version for ref in indexed]:
        changed_urls = [
            after.url
            for before, after in zip(listed, indexed, strict=False)  # their numbers may differ
            if before.version != after.version
        ]
        raise ConfigError(
            "shards changed while they were being read",
            url=changed_urls[0] if changed_urls else None,
            remedy="run the command again; unchanged shards that are still cached are not fetched "
            "again",
        )
