"""Writing of a sample table.

A tar with keys, member sizes and metadata of all samples of a dataset.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from shardcache.errors import ConfigError
from shardcache.protocol import ShardRef
from shardcache.tarindex.contents import MetadataMember, read_metadata, rows_of
from shardcache.writing.sample_tar import END, as_table
from shardcache_client.daemon.choice import DaemonChoice, Patience
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.reading.leased_shard import ShardWindow

_JOB = "shardcache index"
_TIMEOUT_S = 300.0


def write_table(
    urls: Sequence[str],
    socket: Path | None,
    file: IO[bytes],
    metadata: MetadataMember | None,
    tell: Callable[[dict[str, Any]], object],
) -> list[ShardRef]:
    """Write the table of the present versions of the shards; return these, each url once.

    The shards pass through the cache, prefetched by the daemon; their indexes are read from there.
    Raises the errors of a dataset, and MetadataError.

    Args:
        urls: of the shards, as those of a dataset.
        socket: the daemon's, if one is named.
        file: to write to.
        metadata: the member that holds each sample's, if the table is to have it.
        tell: called with an event for each shard.
    """
    choice = DaemonChoice.of(socket)
    reader = ReaderIdentity(_JOB)
    listed = {ref.url: ref for ref in resolve(choice, reader, urls, _TIMEOUT_S)}
    plan = Plan.of(Manifest.of(map(ShardRef, listed)), 0, range(len(listed)))
    session = Session(choice, reader, Patience(_TIMEOUT_S))
    window = ShardWindow(session, plan, partial=False)
    sizes = [ref.size_bytes for ref in listed.values()]
    total_bytes = None if None in sizes else sum(filter(None, sizes))
    found: list[ShardRef] = []
    try:
        session.declare(plan)
        for number, done_bytes in enumerate(accumulate(size or 0 for size in sizes)):
            found.append(_add(file, number, window, metadata))
            tell(
                {
                    "event": "progress",
                    "done_shards": number + 1,
                    "done_bytes": done_bytes,
                    "shards": len(listed),
                    "total_bytes": total_bytes,
                },
            )
        file.write(END)
    finally:
        window.empty()
        session.close()
    return found


def _add(
    file: IO[bytes],
    number: int,
    window: ShardWindow,
    member: MetadataMember | None,
) -> ShardRef:
    """Add the rows of the next shard, and return what they are of."""
    leased_shard = window.take(number, None)
    leased_shard.open()
    try:
        shard = leased_shard.whole
        index = shard.index
        facts = index.header
        metadata = None if member is None else read_metadata(index, shard.tar, member, facts["url"])
        file.writelines(as_table(number, facts["version"], rows_of(index, metadata)))
        return ShardRef(facts["url"], facts["version"], facts["origin_bytes"], len(shard))
    finally:
        window.give_back(leased_shard)


def check_same(listed: Sequence[ShardRef], indexed: Sequence[ShardRef]) -> None:
    """Raise ConfigError unless a table lists the same versions of the same shards as an index."""
    if [ref.version for ref in listed] != [ref.version for ref in indexed]:
        changed = (
            after.url
            for before, after in zip(listed, indexed, strict=False)
            if before.version != after.version
        )
        raise ConfigError(
            "the shards have changed while they were read",
            url=next(changed, None),
            remedy="run the command again; unchanged shards that are still cached are not fetched "
            "again",
        )
