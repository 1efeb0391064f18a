"""The seam between the cache and any remote store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum of the whole object as the store gives it.

    Attributes:
        algorithm: "crc32c", "crc32" or "crc64nvme".
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
    """

    url: str
    version: str
    size_bytes: int
    checksum: Checksum | None = field(default=None, compare=False)
    ranges: bool = True


class Origin(Protocol):
    """A remote store. Every method raises the errors of `shardcache.errors` and no others."""

    async def stat(self, url: str) -> RemoteObject:
        """Return the object's present version. Raises NotFoundError, AccessDeniedError, OriginUnavailableError."""

    async def read_range(self, obj: RemoteObject, start: int, stop: int) -> bytes:
        """Return exactly the bytes [start, stop) of that very version.

        Raises ShardChangedError when the store now holds another version; OriginUnavailableError when a retry may
        help, short or mislabelled answers included. Does not retry by itself and has no time limit of its own.
        """

    def stream(self, obj: RemoteObject, chunk_bytes: int) -> AsyncIterator[bytes]:
        """Yield the whole object in order, in chunks of `chunk_bytes` (the last may be shorter)."""

    async def list_prefix(self, prefix: str) -> list[RemoteObject]:
        """Return every object whose url starts with `prefix`, sorted by url, recursively."""

    async def close(self) -> None:
        """Close connections."""
