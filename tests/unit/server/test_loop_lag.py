"""Lag of the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from shardcache.server.load import LoopLag
from support.programs.daemon import eventually


def test_quantiles_are_right_to_a_tenth() -> None:
    """Each is no less than the true one, and at most a tenth more."""
    lag = LoopLag()
    for number in range(1, 1001):
        lag.note(number / 1000)
    for share, exact_s in ((0.5, 0.5), (0.99, 0.99), (1.0, 1.0)):
        assert exact_s <= lag.quantile_s(share) <= 1.11 * exact_s


def test_old_lag_is_forgotten() -> None:
    """One bad moment is shown for ten minutes and not for ever."""
    lag = LoopLag()
    lag.note(9.0)
    for _ in range(11_999):
        lag.note(0.001)
    assert lag.quantile_s(1.0) == pytest.approx(9.0, rel=0.11)
    lag.note(0.001)
    assert lag.quantile_s(1.0) == pytest.approx(0.001, rel=0.11)


async def test_a_loop_that_was_held_up_shows_it() -> None:
    """A blocked loop is in the figures, for as long as it was blocked."""
    lag = LoopLag()
    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(lag.run())
        await asyncio.sleep(0)
        time.sleep(0.5)  # to hold up the loop is the point
        await asyncio.to_thread(eventually, lambda: lag.quantile_s(1.0) >= 0.4)
        measuring.cancel()
