"""Comparison of received bytes with ETags, which may be MD5s.

The `Downloader` has one `Etags`, and compares each downloaded object whose origin sent no checksum
but an ETag in the form of an MD5.
"""

import asyncio
from pathlib import Path

from shardcache.access.urls import store_of
from shardcache.origin.objects import MD5, RemoteObject, digest_of
from shardcache.shared.exceptions import CorruptShardError
from shardcache.telemetry.logs import SharedLogger

log = SharedLogger()

_MAX_DOUBTED = 1024


class Etags:
    """Knowledge of the origins whose ETags are MD5s.

    An ETag may be the MD5 of the object, but nothing in it shows that. In S3, it is the MD5 if the
    object was uploaded in one piece and is not encrypted with a KMS or customer key; other object
    stores vary. So a mismatch alone proves nothing:

    - A mismatch means damage if another object of the same origin has matched its ETag, as 128 bits
      do not match by chance.
    - Otherwise the object is fetched once more. If the new bytes differ from those of the first
      attempt, the first were damaged in transit. If they are the same, the origin's ETags are not
      MD5s, and are ignored from then on.
    """

    def __init__(self) -> None:
        self._with_md5s: set[str] = set()  # origins where an object matched its ETag
        self._without_md5s: set[str] = set()  # origins whose ETags are not MD5s
        # MD5s of received bytes that differed from the ETag, by url and version.
        self._doubted: dict[tuple[str, str], int] = {}

    async def verify(self, obj: RemoteObject, path: Path) -> None:
        """Compare a file with its object's ETag, if the ETag may be an MD5.

        Raises CorruptShardError; OSError if the file cannot be read.
        """
        # An ETag that may be an MD5 is the object's checksum, unless the origin has sent a better
        # one.
        if obj.checksum is None or obj.checksum.algorithm != MD5:
            return
        if store_of(obj.url) in self._without_md5s:
            return
        received = await asyncio.to_thread(digest_of, path, MD5)
        self.judge(obj, obj.checksum.value, received)

    def judge(self, obj: RemoteObject, wanted: int, received: int) -> None:
        """Compare an object's ETag with the MD5 of the received bytes, and learn from it.

        Args:
            wanted: the ETag, as a number.
            received: the MD5 of the received bytes.

        Raises CorruptShardError.
        """
        origin = store_of(obj.url)
        key = (obj.url, obj.version)
        if received == wanted:
            self._with_md5s.add(origin)
            self._doubted.pop(key, None)
            return

        # A second fetch has brought the same bytes, so they were not damaged in transit.
        is_same_as_before = self._doubted.get(key) == received
        if origin not in self._with_md5s and is_same_as_before:
            self._without_md5s.add(origin)
            log.warning(
                "the origin's ETags are not MD5s; no longer comparing them",
                origin=origin,
            )
            return

        self._doubted[key] = received
        if len(self._doubted) > _MAX_DOUBTED:
            oldest = next(iter(self._doubted))
            del self._doubted[oldest]
        raise CorruptShardError(
            f"the MD5 of the received bytes is {received:032x}, the origin's is {wanted:032x}",
            url=obj.url,
            remedy="upload the shard again; if the origin's value is not the content's MD5, "
            "set `verify_etag = false` in its [[origin]] table",
        )
