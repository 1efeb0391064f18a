"""Performance of an object store: the object's version, time to first byte and the rate over all connections."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass

from shardcache.cache.operations.origin_probe.findings import Finding, of_error, ok, warning
from shardcache.errors import OriginUnavailableError, ShardcacheError
from shardcache.origin.base import Origin, RemoteObject
from shardcache.transport.flow import Free
from shardcache.transport.parts import Parts
from shardcache.units import duration, size

_STAT_LIMIT_S = 20.0
_SAMPLES = 3
_SAMPLE_BYTES = 64 * 1024
_MOST_BYTES = 128 * 1024**2
_LIMIT_S = 5.0
# Minimum durations for a meaningful rate; a slow rate takes longer to measure, as connections have to ramp up.
_TELLING_S = 0.05
_TELLING_SLOW_S = 1.0
_SLOW_FIRST_BYTE_S = 1.0
_SLOW_RATE = 20e6


@dataclass(frozen=True, slots=True)
class Pull:
    """Parameters of a rate measurement: number of connections and part size."""

    connections: int
    part_bytes: int


async def stat(origin: Origin, url: str) -> RemoteObject:
    """Return the object's version. Raises as `Origin.stat` does, and OriginUnavailableError on a timeout."""
    try:
        async with asyncio.timeout(_STAT_LIMIT_S):
            return await origin.stat(url)
    except TimeoutError:
        raise OriginUnavailableError(f"no answer from the object store in {_STAT_LIMIT_S:g} s", url=url) from None


async def reach(origin: Origin, obj: RemoteObject) -> Finding:
    """Measure the time to the first byte of an existing object."""
    try:
        async with asyncio.timeout(_STAT_LIMIT_S):
            first_byte_s = await _first_byte_s(origin, obj)
    except TimeoutError:
        error = OriginUnavailableError("the object store reports the object but sends no bytes of it", url=obj.url)
        return of_error(error)
    except ShardcacheError as exn:
        cause = "the object store reports the object but does not allow it to be read"
        return of_error(exn, cause)
    found = f"first byte after {duration(first_byte_s)}; tried with a shard of {size(obj.size_bytes)}"
    figures = {"first_byte_s": round(first_byte_s, 4), "size_bytes": obj.size_bytes}
    if not obj.ranges:
        cause = "the server ignores range requests, so each shard takes one connection and cannot be resumed"
        remedy = "serve the shards from a server with range support, such as nginx"
        return warning(found, cause, remedy, figures=figures)
    if first_byte_s >= _SLOW_FIRST_BYTE_S:
        cause = "the object store is far away or busy; more concurrent requests make up for it"
        remedy = "shardcache serve --max-connections 32 --shard-connections 16"
        return warning(found, cause, remedy, figures=figures)
    return ok(found, figures=figures)


async def _first_byte_s(origin: Origin, obj: RemoteObject) -> float:
    """Return the median over a few short reads, of which the first may have to connect."""
    return statistics.median([await _one_first_byte_s(origin, obj) for _ in range(_SAMPLES)])


async def _one_first_byte_s(origin: Origin, obj: RemoteObject) -> float:
    began_s, first_s, begun = time.monotonic(), 0.0, asyncio.Event()

    def received(_count: int) -> None:
        nonlocal first_s
        first_s = first_s or time.monotonic()
        begun.set()

    size_bytes = min(_SAMPLE_BYTES, obj.size_bytes) if obj.ranges else obj.size_bytes
    try:
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(_take(origin, obj, iter([_nowhere(0, size_bytes)]), Free(received)))
            fetching.add_done_callback(lambda _: begun.set())
            await begun.wait()
            fetching.cancel()
    except ExceptionGroup as exn:
        raise exn.exceptions[0] from None
    return (first_s or time.monotonic()) - began_s


def _nowhere(start: int, size_bytes: int) -> Parts:
    """Return parts whose bytes are discarded."""
    return Parts(os.devnull, None, max(1, size_bytes), start, size_bytes)


async def speed(origin: Origin, obj: RemoteObject, pull: Pull) -> Finding:
    """Measure the rate over all connections, for a few seconds."""
    done_bytes = 0

    def received(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count

    began_s = time.monotonic()
    try:
        async with asyncio.timeout(_LIMIT_S), asyncio.TaskGroup() as group:
            for puller in _pullers(origin, obj, pull, Free(received)):
                group.create_task(puller)
    except TimeoutError:
        pass  # the time is up; the bytes received so far count
    except ExceptionGroup as exn:
        errors, others = exn.split(ShardcacheError)
        if errors is None or others is not None:
            raise
        return of_error(next(_leaves(errors)), f"after {size(done_bytes)}")
    return _judge(done_bytes, time.monotonic() - began_s, pull)


def _pullers(origin: Origin, obj: RemoteObject, pull: Pull, flow: Free) -> Iterator[Coroutine[None, None, None]]:
    if not obj.ranges:
        yield _take(origin, obj, iter([_nowhere(0, obj.size_bytes)]), flow)
        return
    starts = range(0, min(obj.size_bytes, _MOST_BYTES), pull.part_bytes)
    parts = iter([_nowhere(start, min(pull.part_bytes, obj.size_bytes - start)) for start in starts])
    for _ in range(pull.connections):
        yield _take(origin, obj, parts, flow)


async def _take(origin: Origin, obj: RemoteObject, parts: Iterator[Parts], flow: Free) -> None:
    for part in parts:
        await origin.fetch(obj, part, flow)


def _judge(done_bytes: int, elapsed_s: float, pull: Pull) -> Finding:
    rate = done_bytes / elapsed_s
    figures = {"bytes_per_s": round(rate), "read_bytes": done_bytes, "elapsed_s": round(elapsed_s, 3)}
    found = f"{size(rate)}/s over up to {pull.connections} connections ({size(done_bytes)} in {duration(elapsed_s)})"
    if elapsed_s < (_TELLING_S if rate >= _SLOW_RATE else _TELLING_SLOW_S):
        return ok(f"{found}: too short to be reliable", figures=figures)
    if rate < _SLOW_RATE:
        cause = "training that reads faster than this will wait for the network"
        remedy = "ethtool IFACE | grep Speed   # then look for a proxy, and check the object store's region"
        return warning(found, cause, remedy, figures=figures)
    return ok(found, figures=figures)


def _leaves(group: ExceptionGroup[ShardcacheError]) -> Iterator[ShardcacheError]:
    for exn in group.exceptions:
        if isinstance(exn, ExceptionGroup):
            yield from _leaves(exn)
        else:
            yield exn
