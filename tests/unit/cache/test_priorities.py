"""Priority of a shard's connections, by who waits for it and who reads it already."""

from __future__ import annotations

import pytest

from shardcache.cache.transfers.arriving import Arrival
from shardcache.cache.transfers.priorities import first_priority, priority
from shardcache.cache.transfers.transfers import Class, Transfer
from shardcache.cache.transfers.waiting import Stage, Wait
from shardcache.fetch.connections.priority import Priority
from shardcache.origin.base import RemoteObject
from shardcache.protocol import ShardRef
from shardcache.store.folder import Layout
from shardcache.store.partial import Partial

URL = "s3://bucket/a.tar"
JOB = "job"


@pytest.fixture
async def transfer() -> Transfer:
    """A shard that a plan needs."""
    return Transfer(URL, ShardRef(URL), Class.PLANNED)


@pytest.fixture
def arriving(transfer: Transfer, tmp_path_factory: pytest.TempPathFactory) -> Arrival:
    """The same, of which something can be read."""
    layout = Layout(tmp_path_factory.mktemp("cache"))
    layout.partial.mkdir(parents=True)
    partial = Partial.open(layout, RemoteObject(URL, "1", 4096), 1024)
    transfer.stages.enter(Stage.NETWORK)
    transfer.arriving = Arrival(partial, transfer.coming, transfer.moved, transfer.waits)
    return transfer.arriving


async def test_what_nobody_waits_for_goes_by_its_plan(transfer: Transfer) -> None:
    """Its deadline is its next use; a reader that asks ahead makes it no more urgent."""
    transfer.waits.add(Wait(JOB))
    assert priority([transfer], lambda: 7.0) == Priority(Class.PLANNED, 7.0)


async def test_a_reader_that_needs_the_whole_shard_waits(transfer: Transfer, arriving: Arrival) -> None:
    """Since it has nothing to read; that is no reason for the others to rest, for order helps it little."""
    transfer.waits |= {Wait(JOB, 5.0), Wait("other", 6.0)}
    assert priority([transfer], lambda: 7.0) == Priority(Class.WAITING, 5.0, JOB)


async def test_a_reader_of_what_has_arrived_keeps_its_connections(transfer: Transfer, arriving: Arrival) -> None:
    """While it reads a part, and while it waits for the next: the shard comes first until it is whole."""
    arriving.readers.append(JOB)
    reading = priority([transfer], lambda: 7.0)
    assert (reading.klass, reading.party, reading.alone) == (Class.WAITING, JOB, True)
    transfer.waits.add(Wait(JOB, 5.0))  # as `Reader.more` waits
    assert priority([transfer], lambda: 7.0) == Priority(Class.WAITING, 5.0, JOB, alone=True)


async def test_a_reader_that_waits_for_a_beginning_lets_nobody_begin_before_it(transfer: Transfer) -> None:
    """From the moment that it waits until its own download begins."""
    assert not first_priority(transfer).alone
    transfer.waits.add(wait := Wait(JOB, partial=True))
    assert not first_priority(transfer).alone
    wait.since_s = 5.0
    assert first_priority(transfer) == Priority(Class.WAITING, alone=True)
    transfer.stages.enter(Stage.NETWORK)
    assert not first_priority(transfer).alone


async def test_a_compressed_shard_has_no_beginning() -> None:
    """It is read when it is whole, so nobody rests for it."""
    transfer = Transfer("a", ShardRef("s3://bucket/a.tar.gz"), Class.PLANNED)
    transfer.waits.add(Wait(JOB, 5.0, partial=True))
    assert not first_priority(transfer).alone
