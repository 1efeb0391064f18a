"""Whether what arrived is what the store's ETag says, where that is an MD5 and nothing better is known.

An ETag may be the MD5 of the object, and nothing in it says so: S3 makes it that for what was uploaded in one piece and
not encrypted with a key of KMS or the customer's, other stores as they please. So a difference alone proves nothing:

- It means damage where another object of the same store agreed with its ETag: 128 bits do not agree by chance.
- Elsewhere the object is fetched once more. Bytes that differ from those of the first try were damaged on the way; the
  same ones again, and the ETag is taken for something else than an MD5, there and from then on.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import structlog

from shardcache.errors import CacheDirError, CorruptShardError
from shardcache.origin.base import MD5, RemoteObject
from shardcache.origin.urls import store_of

log = structlog.get_logger()

_REMEMBERED = 1024


class Etags:
    """What is known of stores' ETags."""

    def __init__(self) -> None:
        self._digests: set[str] = set()  # stores of which an object agreed
        self._other: set[str] = set()  # stores whose ETags are something else
        self._doubted: dict[tuple[str, str], int] = {}  # what came under a url and version, and disagreed

    def __repr__(self) -> str:
        return f"<Etags MD5 at {sorted(self._digests)}, something else at {sorted(self._other)}>"

    async def verify(self, obj: RemoteObject, path: Path) -> None:
        """Compare a file with its object's ETag, as far as that says anything.

        Raises CorruptShardError; CacheDirError when the file cannot be read.
        """
        if obj.checksum is None or obj.checksum.algorithm != MD5 or store_of(obj.url) in self._other:
            return
        try:
            found = await asyncio.to_thread(_md5, path)
        except OSError as exn:
            raise CacheDirError(f"cannot read {path} again ({exn.strerror})", url=obj.url) from exn
        self.judge(obj, obj.checksum.value, found)

    def judge(self, obj: RemoteObject, wanted: int, found: int) -> None:
        """Take note of an object's ETag and of the MD5 of what arrived. Raises CorruptShardError."""
        store, name = store_of(obj.url), (obj.url, obj.version)
        if found == wanted:
            self._digests.add(store)
            self._doubted.pop(name, None)
        elif store not in self._digests and self._doubted.get(name) == found:
            self._other.add(store)
            log.warning("the store's ETags are no MD5 of its objects; they are not compared any more", store=store)
        else:
            self._doubt(name, found)
            raise CorruptShardError(
                f"the MD5 of what arrived is {found:032x}, the store's ETag {wanted:032x}",
                url=obj.url,
                remedy="upload the shard again; if the ETag was never meant to be its MD5, put `verify_etag = false` "
                "into the [[origin]] table for it",
            )

    def _doubt(self, name: tuple[str, str], found: int) -> None:
        self._doubted[name] = found
        if len(self._doubted) > _REMEMBERED:
            del self._doubted[next(iter(self._doubted))]


def _md5(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return int.from_bytes(digest.digest(), "big")
