"""The file of a daemon's grant, opened."""

from pathlib import Path

from shardcache.errors import CorruptShardError
from shardcache_client.daemon.lease import Grant
from shardcache_client.samples import mapped_file as files


def open_granted(grant: Grant) -> int:
    """Return a descriptor of a grant's file.

    Raises CorruptShardError if it is another one; CacheDirError if this process cannot read it.
    """
    path = Path(grant["path"])
    try:
        return files.open_file(path, grant["size_bytes"], grant.get("inode"))
    except CorruptShardError as exn:
        raise CorruptShardError(exn.message, url=grant["url"]) from exn
    except OSError as exn:
        raise files.unreadable(exn, path, grant["url"]) from exn
