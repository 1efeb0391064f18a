"""Objects in memory: small ones, and parts from clients that return bytes instead of writing them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Flow
from shardcache.transport.parts import Parts, PartSums, write_parts
from shardcache.transport.workers import Commit

_READ_BYTES = 4 * 1024**2


class Buffers:
    """Reusable buffers for arriving parts: fresh pages would cost more than the copy into them.

    All buffers are kept until none is in use.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lent = 0

    def __repr__(self) -> str:
        return f"<Buffers {self._lent} lent, {len(self._free)} free>"

    async def fetch(
        self, parts: Parts, read_into: Callable[[memoryview], Awaitable[None]], commit: Commit | None
    ) -> list[PartSums] | None:
        """Do what `Origin.fetch` does by means of `read_into`, which fills the whole buffer."""
        with self._lend(parts.size_bytes) as buffer:
            await read_into(buffer)
            if commit is not None and not await commit():
                return None
            return await asyncio.to_thread(write_parts, parts, buffer)

    @contextmanager
    def _lend(self, size_bytes: int) -> Iterator[memoryview]:
        buffer = self._free.pop() if self._free else bytearray()
        if len(buffer) < size_bytes:
            buffer = bytearray(size_bytes)
        self._lent += 1
        try:
            yield memoryview(buffer)[:size_bytes]
            self._free.append(buffer)  # not after an error: a thread may still be writing it to disk
        finally:
            self._lent -= 1
            if not self._lent:  # nothing is being fetched: give the memory back
                self._free.clear()


async def read_object(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    """Return all bytes of a small object. Raises what `Origin.fetch` does."""
    fd = os.memfd_create("shardcache-object")
    try:
        path = f"/proc/{os.getpid()}/fd/{fd}"  # the transport workers run as the same user
        step_bytes = _READ_BYTES if obj.ranges else max(1, obj.size_bytes)
        for start in range(0, obj.size_bytes, step_bytes):
            size_bytes = min(step_bytes, obj.size_bytes - start)
            await origin.fetch(obj, Parts(path, None, step_bytes, start, size_bytes), flow)
        return await asyncio.to_thread(os.pread, fd, obj.size_bytes, 0)
    finally:
        os.close(fd)
