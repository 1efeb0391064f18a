"""The share of the cache for ranges asked for ahead: who is let in, and when."""

import asyncio

import pytest

from shardcache.cache.space.ahead_space import AheadSpace, RangePlaces

LIMIT_BYTES = 100


@pytest.fixture
def ahead() -> AheadSpace:
    return AheadSpace(lambda: LIMIT_BYTES)


async def entering(places: RangePlaces, number: int, size_bytes: int) -> asyncio.Task[None]:
    """Return the task of a range that was asked for, after it has had its turn."""
    task = asyncio.create_task(places.enter(number, size_bytes, is_awaited=False))
    await settled()
    return task


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_ranges_asked_for_ahead_share_the_limit(ahead: AheadSpace) -> None:
    """In the order of request, whoever asked for them; a small one does not pass a large one."""
    one = RangePlaces(ahead)
    other = RangePlaces(ahead)
    assert one.try_enter(1, 60, is_awaited=False)
    large = await entering(other, 1, 50)
    small = await entering(one, 2, 10)
    assert not large.done()
    assert not small.done()

    one.leave(1)
    await settled()
    assert large.done()
    assert small.done()


async def test_awaited_range_is_let_in_beyond_the_limit(ahead: AheadSpace) -> None:
    """One of each reader; the next one as soon as it is released."""
    places = RangePlaces(ahead)
    assert places.try_enter(1, 100, is_awaited=False)
    first = await entering(places, 2, 70)
    second = await entering(places, 3, 1000)
    places.need(2)
    places.need(3)
    await settled()
    assert first.done()
    assert places.is_first(2)
    assert not second.done()

    places.leave(2)
    await settled()
    assert second.done()
    assert places.is_first(3)


async def test_range_larger_than_the_limit_delays_no_other(ahead: AheadSpace) -> None:
    """It is let in once its reader waits for it."""
    places = RangePlaces(ahead)
    huge = await entering(places, 1, 101)
    assert places.try_enter(2, 100, is_awaited=False)
    assert not huge.done()
    places.need(1)
    await settled()
    assert huge.done()


async def test_cancelled_range_leaves_the_queue(ahead: AheadSpace) -> None:
    """Those behind it are let in."""
    places = RangePlaces(ahead)
    assert places.try_enter(1, 60, is_awaited=False)
    blocked = await entering(places, 2, 50)
    behind = await entering(places, 3, 40)
    blocked.cancel()
    places.leave(2)
    await settled()
    assert behind.done()
