"""Small objects, such as index files, read whole into memory.

Origins write what they fetch into files, so an object is first fetched into a file in memory.
"""

import asyncio
import os

from shardcache.origin.base import Origin
from shardcache.origin.objects import DIGESTS, RemoteObject, digest_of_bytes
from shardcache.shared.exceptions import CorruptShardError
from shardcache.transport.between.checksums import ALGORITHMS, combined
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.parts import Parts, PartSums

_PART_BYTES = 4 * 1024**2  # number of bytes of one request


async def read_object(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    """Return all bytes of a small object, verified by the checksum that its origin states.

    An MD5 is not verified: it may be an ETag that only looks like one. Raises the errors of
    `Origin.fetch`, and CorruptShardError if the bytes were damaged in two attempts.
    """
    try:
        return await _read_once(origin, obj, flow)
    except CorruptShardError:  # the bytes may have been damaged on their way: request them again
        return await _read_once(origin, obj, flow)


async def _read_once(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    """Return an object's bytes in one attempt. Raises CorruptShardError if they are damaged."""
    fd = os.memfd_create("shardcache-object")
    try:
        await _fetch(origin, obj, flow, fd)
        data = await asyncio.to_thread(os.pread, fd, obj.size_bytes, 0)
    finally:
        os.close(fd)

    stated = obj.checksum
    if stated is not None and stated.algorithm in DIGESTS:
        computed = await asyncio.to_thread(digest_of_bytes, data, stated.algorithm)
        stated.check(computed, obj.url)
    return data


async def _fetch(origin: Origin, obj: RemoteObject, flow: Flow, fd: int) -> None:
    """Write an object to an open file, one request after another.

    The object is verified here if its checksum can be combined from the checksums of its parts.
    Raises CorruptShardError if it is damaged.
    """
    stated = obj.checksum
    algorithm = None  # of the parts' checksums
    if stated is not None and stated.algorithm in ALGORITHMS:
        algorithm = stated.algorithm

    part_bytes = _PART_BYTES
    if not obj.has_ranges:
        part_bytes = max(1, obj.size_bytes)  # `range` needs a step of at least 1
    sums: list[PartSums] = []
    for start in range(0, obj.size_bytes, part_bytes):
        parts = Parts(
            path="",
            journal_path=None,
            part_bytes=part_bytes,
            start=start,
            size_bytes=min(part_bytes, obj.size_bytes - start),
            algorithm=algorithm,
            fd=fd,
        )
        part_sums = await origin.fetch(obj, parts, flow)
        assert part_sums is not None  # None is returned only if there is a `commit`
        sums += part_sums

    if stated is not None and algorithm is not None:
        checksums = [part.checksum for part in sums]
        computed = combined(algorithm, checksums, part_bytes, obj.size_bytes)
        stated.check(computed, obj.url)
