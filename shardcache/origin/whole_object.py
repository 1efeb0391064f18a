"""Small objects, read whole into memory."""

import asyncio
import os

from shardcache.errors import CorruptShardError
from shardcache.origin.base import Origin
from shardcache.origin.objects import DIGESTS, RemoteObject, digest_of_bytes
from shardcache.transport.between.checksums import ALGORITHMS, combined
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.parts import Parts, PartSums

_READ_BYTES = 4 * 1024**2


async def read_object(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    """Return all bytes of a small object, compared with its checksum, unless that is presumed.

    Raises what `Origin.fetch` does; CorruptShardError if other bytes have arrived twice.
    """
    try:
        return await _read_once(origin, obj, flow)
    except CorruptShardError:  # a second request cures what was damaged on the way
        return await _read_once(origin, obj, flow)


async def _read_once(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    fd = os.memfd_create("shardcache-object")
    try:
        await _fetch(origin, obj, flow, fd)
        data = await asyncio.to_thread(os.pread, fd, obj.size_bytes, 0)
    finally:
        os.close(fd)

    wanted = obj.checksum
    if wanted is not None and wanted.algorithm in DIGESTS:
        found = await asyncio.to_thread(digest_of_bytes, data, wanted.algorithm)
        wanted.check(found, obj.url)
    return data


async def _fetch(origin: Origin, obj: RemoteObject, flow: Flow, fd: int) -> None:
    """Write an object to an open file, and compare it with a checksum that its parts have."""
    wanted = obj.checksum
    algorithm = None
    if wanted is not None and wanted.algorithm in ALGORITHMS:
        algorithm = wanted.algorithm

    step_bytes = _READ_BYTES if obj.ranges else max(1, obj.size_bytes)
    sums: list[PartSums] = []
    for start in range(0, obj.size_bytes, step_bytes):
        size_bytes = min(step_bytes, obj.size_bytes - start)
        parts = Parts("", None, step_bytes, start, size_bytes, algorithm, fd)
        sums += await origin.fetch(obj, parts, flow) or ()

    if wanted is not None and algorithm is not None:
        checksums = [part.checksum for part in sums]
        found = combined(algorithm, checksums, step_bytes, obj.size_bytes)
        wanted.check(found, obj.url)
