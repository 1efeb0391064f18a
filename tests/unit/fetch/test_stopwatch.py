"""Working time, without times of rest."""

from __future__ import annotations

import asyncio

import pytest

from shardcache.fetch.reads import Stopwatch


async def test_it_counts_only_while_it_runs() -> None:
    """Before it was started and after it was stopped no time passes."""
    watch = Stopwatch()
    await asyncio.sleep(0.01)
    assert watch.elapsed_s == 0
    watch.run()
    watch.run()
    await asyncio.sleep(0.01)
    watch.stop()
    stopped_s = watch.elapsed_s
    assert stopped_s > 0
    await asyncio.sleep(0.01)
    watch.stop()
    assert watch.elapsed_s == stopped_s


async def test_who_waits_for_it_waits_for_the_time_that_it_ran() -> None:
    """A rest puts the moment off; nothing is over before it ran for so long."""
    watch = Stopwatch()
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(watch.reaches(0.02))
        watch.run()
        await asyncio.sleep(0.005)
        watch.stop()
        rested_s = watch.elapsed_s
        await asyncio.sleep(0.1)
        assert rested_s >= 0.02 or not waiting.done()
        watch.run()
    assert watch.elapsed_s >= 0.02


async def test_what_never_runs_is_never_reached() -> None:
    """Whoever waits for that has to be cancelled."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await Stopwatch().reaches(0.001)
