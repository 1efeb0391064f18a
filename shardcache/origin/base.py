"""The seam between the cache and any remote store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shardcache.transport.flow import Flow, Received
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit

MD5 = "md5"


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum of the whole object as the store gives it.

    Attributes:
        algorithm: "crc32c", "crc32" or "crc64nvme", or `MD5`, which is only presumed: an ETag does not say what it is.
        value: as an unsigned integer.
    """

    algorithm: str
    value: int


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One version of one object.

    Attributes:
        url: the original url.
        version: ETag or what stands for it; two reads under one version give the same bytes.
        size_bytes: size in the store.
        checksum: of the whole object, where the store has one.
        ranges: whether the store answers ranged reads; without, the object comes as one stream.
        guarded: whether each read by itself notices that the store holds another version; without, whoever reads
            has to ask for the version once more at the end.
    """

    url: str
    version: str
    size_bytes: int
    checksum: Checksum | None = field(default=None, compare=False)
    ranges: bool = True
    guarded: bool = field(default=True, compare=False)


class Origin(Protocol):
    """A remote store. Every method raises the errors of `shardcache.errors` and no others.

    None retries by itself. Limits of time are the caller's, who is told of every chunk.
    """

    async def stat(self, url: str) -> RemoteObject:
        """Return the object's present version. Raises NotFoundError, AccessDeniedError, OriginUnavailableError."""

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """Write bytes of that very version into their file, and return the checksums of each part.

        Args:
            parts: one part; all of them where the object has no `ranges`.
            commit: asked once all bytes are there and none is written; where it returns False, none is, and the
                result is None.

        Raises ShardChangedError when the store now holds another version; OriginUnavailableError when a retry may
        help, short or mislabelled answers included; PartFileError.
        """

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """Return every object whose url starts with `prefix`, sorted by url, recursively; none is an empty list.

        `received` is told of objects, not of bytes.
        """

    async def close(self) -> None:
        """Close connections."""
