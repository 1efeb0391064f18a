"""The audit log's epochs, and the lag of the event loop."""

import asyncio
import time

from structlog.testing import capture_logs

from shardcache.server.service import Audit, LoopLag
from support.programs.daemon import eventually

JOB = ("train", 0)


def test_readers_in_any_order_begin_an_epoch_once() -> None:
    """Some are an epoch ahead of others; another job and another user of its name have epochs of their own."""
    audit = Audit()
    with capture_logs() as lines:
        for epoch, reader in [
            (0, (0, 0)),
            (0, (0, 1)),
            (1, (0, 0)),
            (0, (1, 0)),
            (1, (1, 0)),
            (1, (0, 1)),
            (2, (0, 1)),
        ]:
            audit.plan(JOB, epoch, reader)
        audit.plan(("eval", 0), 0, (0, 0))
        audit.plan(("train", 1000), 0, (0, 0))
    assert [(line["uid"], line["epoch"]) for line in lines] == [(0, 0), (0, 1), (0, 2), (0, 0), (1000, 0)]


def test_a_reader_that_begins_again_begins_for_all() -> None:
    """The job was started again; its other readers join that run."""
    audit, begun = Audit(), []
    for worker in (0, 1, 2, 0, 1, 2, 2):
        with capture_logs() as lines:
            audit.plan(JOB, 0, (0, worker))
        begun.append(bool(lines))
    assert begun == [True, False, False, True, False, False, True]


def test_job_names_of_clients_are_bounded() -> None:
    """Numbers that a client makes up take no memory without end."""
    audit = Audit()
    for number in range(2000):
        audit.plan(JOB, number, (0, 0))
        audit.plan(JOB, None, (number, 0))
    assert len(audit._epochs) < 1000 and max(map(len, audit._epochs.values())) < 2000


def test_quantiles_of_the_lag_are_those_of_its_measurements() -> None:
    """The median, the 99th percentile and the maximum, in whatever order they were measured."""
    lag = LoopLag()
    assert lag.to_json() == {"p50_s": 0.0, "p99_s": 0.0, "max_s": 0.0}
    for number in range(1000, 0, -1):
        lag.note(number / 1000)
    assert lag.to_json() == {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}


def test_old_lag_is_forgotten() -> None:
    """One bad moment is shown for ten minutes and not for ever."""
    lag = LoopLag()
    lag.note(9.0)
    for _ in range(11_999):
        lag.note(0.001)
    assert lag.to_json()["max_s"] == 9.0
    lag.note(0.001)
    assert lag.to_json()["max_s"] == 0.001


async def test_a_loop_that_was_held_up_shows_it() -> None:
    """A blocked loop is in the figures, for as long as it was blocked."""
    lag = LoopLag()
    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(lag.run())
        await asyncio.sleep(0)
        time.sleep(0.5)  # to hold up the loop is the point
        await asyncio.to_thread(eventually, lambda: lag.to_json()["max_s"] >= 0.4)
        measuring.cancel()
