"""Long computations take turns."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from shardcache.cache.waits import Turns
from shardcache.protocol import ShardRef
from shardcache.server.session import written
from support.programs.guard import GUARD_S

LONG = list(range(10_000))


def fill_a_turn() -> None:
    """Compute for longer than a turn lasts."""
    until_s = time.perf_counter() + 0.0015
    while time.perf_counter() < until_s:
        pass


async def test_the_loop_runs_between_any_two_turns() -> None:
    """However many have long lists at the same moment, and however long their items take."""
    turns, done, most_between = Turns(), 0, 0

    def work(_piece: object) -> None:
        nonlocal done
        done += 1
        fill_a_turn()

    async def others() -> None:
        nonlocal most_between
        while True:
            before = done
            await asyncio.sleep(0)
            most_between = max(most_between, done - before)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(others())
        async with asyncio.TaskGroup() as workers:
            for _ in range(8):
                workers.create_task(turns.take(LONG[:320], work))
        watching.cancel()
    assert (done, most_between) == (8 * 10, 1)


async def test_a_short_list_does_not_wait_for_the_end_of_a_long_one() -> None:
    """A late caller has its turn after one of the others, not after all of them."""
    turns, order = Turns(), []

    def work(_piece: object) -> None:
        order.append("long")
        fill_a_turn()

    async with asyncio.TaskGroup() as group:
        group.create_task(turns.take(LONG[:320], work))
        group.create_task(turns.take([1], lambda _: order.append("short")))
    assert order.index("short") == 1


async def test_an_error_ends_only_its_own_turn() -> None:
    """An error of a computation reaches its caller, and the next caller has its turn."""
    turns = Turns()

    def fail(_piece: object) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await turns.take(LONG, fail)
    async with asyncio.timeout(GUARD_S):
        await turns.wait()


@pytest.mark.parametrize("count", [0, 1, 256, 257, 5_000])
async def test_a_manifest_written_in_pieces_is_the_same_json(count: int) -> None:
    """Of any length, with all that needs quoting."""
    refs = [ShardRef(f's3://b/"{number}".tar', None, number) for number in range(count)]
    message = {"type": "manifest", "shards": refs, "id": 7, "error": {"url": None}}
    expected = {**message, "shards": [ref.to_json() for ref in refs]}
    assert json.loads(await written(message, Turns())) == expected
