"""Reading from an origin as tests like it: bytes out."""

from __future__ import annotations

from shardcache.origin.base import Flow, Free, Origin, RemoteObject


async def read_range(origin: Origin, obj: RemoteObject, start: int, stop: int, flow: Flow | None = None) -> bytes:
    """Return the bytes [start, stop)."""
    buffer = bytearray(stop - start)
    await origin.read_into(obj, start, memoryview(buffer), flow or Free())
    return bytes(buffer)


async def stream(origin: Origin, obj: RemoteObject, part_bytes: int) -> list[bytes]:
    """Return the whole object in parts."""
    return [bytes(part) async for part in origin.stream(obj, memoryview(bytearray(part_bytes)), Free())]
