"""The seam between the cache and any remote store."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Received: TypeAlias = Callable[[int], None]
"""Told how much just came in, so that whoever waits can tell slow from stalled."""


class Flow(Protocol):
    """What a read tells of its bytes, and by which it is told to let others go first.

    Attributes:
        leave_bytes: how many may be read at once; more is no harm, but unevenness where bandwidth is limited.

    A read that takes its bytes chunk by chunk awaits `ready` before each. One that is given them as they come is
    `interruptible`: when called, it stops listening until `ready` returns, so that the store has to stop as well
    (TCP's flow control) and every byte still comes, once.
    """

    @property
    def leave_bytes(self) -> float: ...  # noqa: D102

    def received(self, count: int) -> None:
        """Note that so many bytes came in."""

    async def ready(self) -> None:
        """Return once the next bytes may be read."""

    def interruptible(self, rest: Callable[[], object]) -> AbstractContextManager[None]:
        """Have `rest` called whenever, during the block, the read shall stop until it is `ready` again."""


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

    async def read_into(self, obj: RemoteObject, start: int, buffer: memoryview, flow: Flow) -> None:
        """Fill the buffer with the bytes from `start` on of that very version.

        Raises ShardChangedError when the store now holds another version; OriginUnavailableError when a retry may
        help, short or mislabelled answers included.
        """

    def stream(self, obj: RemoteObject, buffer: memoryview, flow: Flow) -> AsyncGenerator[memoryview, None]:
        """Yield the whole object in order: views of the buffer, all of it but for the last. Raises as above.

        A view holds its bytes until the next is asked for.
        """

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """Return every object whose url starts with `prefix`, sorted by url, recursively; none is an empty list.

        `received` is told of objects, not of bytes.
        """

    async def close(self) -> None:
        """Close connections."""


async def stream_ranges(
    origin: Origin, obj: RemoteObject, buffer: memoryview, flow: Flow
) -> AsyncGenerator[memoryview, None]:
    """Do what `Origin.stream` does by ranges."""
    for start in range(0, obj.size_bytes, len(buffer)):
        part = buffer[: obj.size_bytes - start]
        await origin.read_into(obj, start, part, flow)
        yield part


def nothing(count: int) -> None:
    """Take no notice of what is received."""


class Free:
    """A flow that nothing hinders."""

    leave_bytes = math.inf

    def __init__(self, received: Received = nothing) -> None:
        self.received = received

    async def ready(self) -> None:
        """As `Flow.ready`: at once."""

    def interruptible(self, rest: Callable[[], object]) -> AbstractContextManager[None]:
        """As `Flow.interruptible`: never interrupted."""
        return nullcontext()
