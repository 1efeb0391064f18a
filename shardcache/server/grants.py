"""Grants: answers to a reader's request for a lease, which is the right to read one shard.

A grant states the path of the shard's file, and how much of it the reader may read. `ReaderSession`
sends it. An arriving shard is one that the daemon is still fetching. Of a file of which only ranges
are cached, a reader leases one range.
"""

from shardcache.cache.readers.held_ranges import HeldRange
from shardcache.cache.readers.leases import Lease
from shardcache.cache.waiting.arrival import Arrival
from shardcache.shared.protocol import Json
from shardcache.shared.wording.redact import redact
from shardcache.store.folder.layout import Layout
from shardcache.store.partial import Partial
from shardcache.store.shard import Facts


def grant_of(lease: Lease, request: Json, layout: Layout) -> Json:
    """Return the grant of a lease.

    Args:
        lease: a lease of a whole shard, an arriving shard, or a range.
        request: the reader's message, `lease` or `more`.
        layout: paths of published shards.
    """
    if lease.is_whole and lease.facts is not None:
        return _whole_grant(lease, lease.facts, layout)

    granted = lease.granted
    if isinstance(granted, HeldRange):
        readable_to = 0  # no more than the requested bytes
        # Only a range that is needed now also holds the cached bytes that follow it. Ranges that
        # are not needed yet share a limited part of the cache's space.
        if request.get("needed"):
            readable_to = granted.hold_ahead(request.get("ahead_to", 0))
        return _incomplete_grant(lease, granted.file.partial, readable_to)

    # A granted lease is for a published shard, a range or an arriving shard.
    assert isinstance(granted, Arrival)
    return _incomplete_grant(lease, granted.partial, granted.ready_bytes)


def _whole_grant(lease: Lease, facts: Facts, layout: Layout) -> Json:
    """Return the grant of a whole shard."""
    return {
        "type": "leased",
        "lease": lease.number,
        "url": facts.url,
        "version": facts.version,
        **_paths(lease, layout),
        "size_bytes": facts.size_bytes,
        "samples": facts.samples or 0,
    }


def _paths(lease: Lease, layout: Layout) -> Json:
    """Return the paths of a whole shard's files.

    If the files are not published yet, the inode is returned as well: the paths may soon be other
    files'.
    """
    if lease.shard is not None:
        key = lease.shard.key
        return {"path": str(layout.tar(key)), "index_path": str(layout.sidecar(key))}
    # A lease on a whole shard without a published shard has the unpublished files.
    assert lease.files is not None
    files = lease.files
    return {"path": str(files.tar), "index_path": str(files.sidecar), "inode": files.inode}


def _incomplete_grant(lease: Lease, partial: Partial, readable_to: int) -> Json:
    """Return the grant of a file of which some bytes are missing.

    Args:
        lease: the lease of the arriving shard or of the range.
        partial: the file.
        readable_to: offset up to which the file may be read; 0 to read only the requested range.
    """
    obj = partial.obj
    return {
        "type": "arriving",
        "lease": lease.number,
        "url": redact(obj.url),
        "version": obj.version,
        "path": str(partial.path),
        "inode": partial.inode,
        "size_bytes": obj.size_bytes,
        "ready_bytes": readable_to,
    }
