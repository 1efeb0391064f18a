"""arriving.py: readers see finished parts and the beginning of the next one, and nothing is taken back."""

from __future__ import annotations

import math
from pathlib import Path

from shardcache.cache.signal import Signal
from shardcache.cache.transfers.arriving import Arrival
from shardcache.errors import ShardChangedError
from shardcache.fetch.parts.pausable_read import Coming, PausableRead
from shardcache.fetch.parts.stall_timeout import StallTimeout
from shardcache.origin.base import RemoteObject
from shardcache.store.folder import Layout
from shardcache.store.partial import Partial
from shardcache.transport.flow import nothing
from shardcache.transport.parts import PartSums

URL, PART, SIZE = "s3://bucket/a.tar", 1000, 2500


def read() -> PausableRead:
    """Return a read of a part without limits."""

    async def grant(wanted_bytes: float) -> float:
        return math.inf

    return PausableRead(StallTimeout(60.0, URL, nothing), PART, grant)


async def test_ready_bytes(tmp_path: Path) -> None:
    """They grow with what is written of the first unfinished part, whatever becomes of its request."""
    layout, signal = Layout(tmp_path), Signal()
    layout.partial.mkdir(parents=True)
    partial = Partial.open(layout, RemoteObject(URL, "1", SIZE), PART)
    coming = Coming(signal.notify)
    arrival = Arrival(partial, coming, signal, set())
    first, again, second, last = read(), read(), read(), read()
    assert not arrival.is_worth_reading

    coming.begin(0, first)
    coming.begin(1, second)
    second.written(900)
    assert arrival.ready_bytes == 0, "what comes later does not begin the shard"
    first.written(300)
    assert (arrival.ready_bytes, arrival.is_worth_reading, signal.count) == (300, True, 2)

    coming.begin(0, again)  # the first request failed
    again.written(100)
    assert arrival.ready_bytes == 300, "the same bytes are written again"
    again.written(400)
    assert arrival.ready_bytes == 400

    coming.end(0)
    partial.record(PartSums(0, 0, 0))
    assert arrival.ready_bytes == 1900, "the second part has begun"
    coming.end(1)
    partial.record(PartSums(1, 0, 0))
    coming.begin(2, last)
    last.written(500)
    assert (arrival.ready_bytes, arrival.is_worth_reading) == (SIZE, False)


async def test_a_beginning_without_an_end_is_not_read(tmp_path: Path) -> None:
    """A reader that comes after the failure waits for the next attempt instead of getting the error of this one."""
    layout, signal = Layout(tmp_path), Signal()
    layout.partial.mkdir(parents=True)
    partial = Partial.open(layout, RemoteObject(URL, "1", SIZE), PART)
    arrival = Arrival(partial, Coming(signal.notify), signal, set())
    partial.record(PartSums(0, 0, 0))
    assert arrival.is_worth_reading
    arrival.fail(ShardChangedError("replaced", url=URL))
    assert not arrival.is_worth_reading
