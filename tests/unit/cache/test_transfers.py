"""Whoever waits for a transfer is answered, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shardcache.cache.catalog.aliases import AliasTable
from shardcache.cache.planner import Planner
from shardcache.cache.signal import Signal
from shardcache.cache.transfers.arriving import Arrival
from shardcache.cache.transfers.transfers import Class, PostponedError, Transfer, Transfers
from shardcache.cache.transfers.waiting import Wait
from shardcache.errors import NotFoundError, OriginUnavailableError, ShardcacheError
from shardcache.protocol import ShardRef
from shardcache.store.shard import Shard

REF = ShardRef("s3://bucket/a.tar")
SHARD = Shard("key", 1, 1, 0.0)


async def waited(fetch: Callable[[Transfer], Awaitable[Shard]], *, ahead: bool = False) -> Shard | Arrival:
    """Return what a reader gets, of a transfer of its own or of one that was begun ahead of it."""
    async with asyncio.TaskGroup() as group:
        transfers = Transfers(fetch, lambda: None, Planner(AliasTable()), Signal(), group, lambda *_: None)
        if ahead:
            transfers.start("a", REF, Class.PLANNED)
        return await transfers.wait("a", REF, Class.PLANNED, Wait())


async def outcome(fetch: Callable[[Transfer], Awaitable[Shard]], *, ahead: bool = False) -> ShardcacheError:
    """Return the error that a reader gets."""
    with pytest.RaisesGroup(ShardcacheError) as caught:
        await waited(fetch, ahead=ahead)
    error = caught.value.exceptions[0]
    assert isinstance(error, ShardcacheError)
    return error


async def test_an_error_reaches_the_reader_as_itself() -> None:
    """The origin's error is what the reader is told, at the first try."""
    tries = 0

    async def fetch(transfer: Transfer) -> Shard:
        nonlocal tries
        tries += 1
        raise NotFoundError("gone", url=transfer.ref.url)

    assert (await outcome(fetch)).code == "not_found"
    assert tries == 1


async def test_a_bug_fails_one_shard() -> None:
    """An exception that nobody foresaw becomes an error of that shard, and the daemon goes on."""

    async def fetch(transfer: Transfer) -> Shard:
        raise ZeroDivisionError

    assert "ZeroDivisionError" in (await outcome(fetch)).message


async def test_a_postponed_transfer_answers_who_waits() -> None:
    """A reader that came in at the last moment is told, and not left alone."""

    async def fetch(transfer: Transfer) -> Shard:
        raise PostponedError

    assert isinstance(await outcome(fetch), OriginUnavailableError)


async def test_who_joins_a_failing_transfer_has_a_try_of_its_own() -> None:
    """The last of a prefetch's tries is not the only one of the reader that joined it."""
    tries = 0

    async def fetch(transfer: Transfer) -> Shard:
        nonlocal tries
        tries += 1
        await asyncio.sleep(0)
        if tries == 1:
            raise OriginUnavailableError("away")
        return SHARD

    assert await waited(fetch, ahead=True) is SHARD
    assert tries == 2


async def test_a_reader_that_leaves_cancels_nothing() -> None:
    """The transfer goes on for the others."""
    begun, let = asyncio.Event(), asyncio.Event()

    async def fetch(transfer: Transfer) -> Shard:
        begun.set()
        await let.wait()
        return SHARD

    async with asyncio.TaskGroup() as group:
        transfers = Transfers(fetch, lambda: None, Planner(AliasTable()), Signal(), group, lambda *_: None)
        leaving = group.create_task(transfers.wait("a", REF, Class.PLANNED, Wait()))
        staying = group.create_task(transfers.wait("a", REF, Class.PLANNED, Wait()))
        await begun.wait()
        leaving.cancel()
        await asyncio.sleep(0)
        let.set()
        assert await staying is SHARD
    assert leaving.cancelled()
