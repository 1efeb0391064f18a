"""Reading from an origin as tests like it: bytes out."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Flow, Free
from shardcache.transport.parts import Parts, PartSums


async def read_range(origin: Origin, obj: RemoteObject, start: int, stop: int, flow: Flow | None = None) -> bytes:
    """Return the bytes [start, stop), as one part."""
    with tempfile.NamedTemporaryFile() as file:
        await origin.fetch(obj, Parts(file.name, None, obj.size_bytes, start, stop - start), flow or Free())
        return os.pread(file.fileno(), stop - start, start)


async def read_whole(origin: Origin, obj: RemoteObject, part_bytes: int) -> list[bytes]:
    """Return the whole object, fetched as a download does it, in the parts whose checksums came."""
    with tempfile.NamedTemporaryFile() as file:
        step_bytes = part_bytes if obj.ranges else max(1, obj.size_bytes)
        finished: list[PartSums] = []
        for start in range(0, obj.size_bytes, step_bytes):
            parts = Parts(file.name, None, part_bytes, start, min(step_bytes, obj.size_bytes - start))
            finished += await origin.fetch(obj, parts, Free()) or []
        data = Path(file.name).read_bytes()
        return [data[sums.index * part_bytes :][:part_bytes] for sums in finished]
