"""Records and measurements of the daemon: audit log, histograms, loop lag, collections."""

import asyncio
import gc
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shardcache.daemon.garbage_collection import (
    creating_long_lived_objects,
    make_collections_rare,
)
from shardcache.server.audit import Audit
from shardcache.server.process.process_load import LoopLag
from shardcache.telemetry.metrics import OTHERS, Histogram, Histograms
from support.programs.daemon import eventually

JOB = ("train", 0)
BOUNDS = (0.1, 1.0, 10.0)


def test_readers_in_any_order_begin_an_epoch_once() -> None:
    """Some readers are an epoch ahead; other jobs and users have epochs of their own."""
    audit = Audit()
    readers = [
        (0, (0, 0)),
        (0, (0, 1)),
        (1, (0, 0)),
        (0, (1, 0)),
        (1, (1, 0)),
        (1, (0, 1)),
        (2, (0, 1)),
    ]
    with capture_logs() as lines:
        for epoch, reader in readers:
            audit.note_plan(JOB, epoch, reader)
        audit.note_plan(("eval", 0), 0, (0, 0))
        audit.note_plan(("train", 1000), 0, (0, 0))
    assert [(line["uid"], line["epoch"]) for line in lines] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 0),
        (1000, 0),
    ]


def test_a_reader_that_begins_again_begins_for_all() -> None:
    """The job was started again; its other readers join that run."""
    audit = Audit()
    begun = []
    for worker in (0, 1, 2, 0, 1, 2, 2):
        with capture_logs() as lines:
            audit.note_plan(JOB, 0, (0, worker))
        begun.append(bool(lines))
    assert begun == [True, False, False, True, False, False, True]


def test_job_names_of_clients_are_bounded() -> None:
    """Numbers that a client makes up take no memory without end."""
    audit = Audit()
    for number in range(2000):
        audit.note_plan(JOB, number, (0, 0))
        audit.note_plan(JOB, None, (number, 0))
    assert len(audit._epochs) < 1000
    assert max(map(len, audit._epochs.values())) < 2000


@given(values=st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.5, 1.0, 1.5, 10.0, 10.5, 99.0])))
def test_each_bucket_has_what_does_not_exceed_its_bound(values: list[float]) -> None:
    """A value on a bound belongs below it, as with Prometheus' `le`; the last has all."""
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    below = [sum(value <= bound for value in values) for bound in BOUNDS]
    assert histogram.cumulative() == [*below, len(values)]
    assert histogram.sum == sum(values)


def test_ever_more_labels_share_one_histogram() -> None:
    """Whoever reads from ever more stores cannot make the page grow without end."""
    histograms = Histograms(BOUNDS)
    for number in range(1000):
        histograms.of(f"https://host-{number}").observe(1.0)
    counts = {
        label: histogram.cumulative()[-1] for label, histogram in histograms.by_label().items()
    }
    assert len(counts) == 65
    assert counts["https://host-0"] == 1
    assert counts[OTHERS] == 1000 - 64


def test_quantiles_of_the_lag_are_those_of_the_last_ten_minutes() -> None:
    """The median, the 99th percentile and the maximum, in whatever order they were measured."""
    lag = LoopLag()
    assert lag.to_json() == {"p50_s": 0.0, "p99_s": 0.0, "max_s": 0.0}
    for number in range(1000, 0, -1):
        lag.note(number / 1000)
    assert lag.to_json() == {"p50_s": 0.5, "p99_s": 0.99, "max_s": 1.0}
    for _ in range(5_000):
        lag.note(0.001)
    assert lag.to_json()["max_s"] == 1.0
    lag.note(0.001)
    assert lag.to_json()["max_s"] == 0.999


def test_an_early_timer_is_no_lag() -> None:
    """Prometheus refuses a histogram whose sum is negative."""
    lag = LoopLag()
    lag.note(-0.0003)
    assert lag.to_json()["max_s"] == 0.0
    assert lag.since_start.sum == 0.0


async def test_a_loop_that_was_held_up_shows_it() -> None:
    """A blocked loop is in the figures, for as long as it was blocked."""
    lag = LoopLag()
    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(lag.run())
        await asyncio.sleep(0)
        time.sleep(0.5)  # to hold up the loop is the point
        await asyncio.to_thread(eventually, lambda: lag.to_json()["max_s"] >= 0.4)
        measuring.cancel()


@pytest.fixture
def collector() -> Iterator[None]:
    """This process's garbage collector, which is left as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_objects_built_at_the_start_are_never_collected() -> None:
    """They are in no generation, so that no later collection scans them."""
    with creating_long_lived_objects():
        assert not gc.isenabled()
        built = [[number] for number in range(10_000)]
    assert gc.isenabled()
    assert len(gc.get_objects()) < len(built)


@pytest.mark.usefixtures("collector")
def test_collections_become_rarer() -> None:
    """Those of young objects; a full one follows a fixed number of these."""
    gc.set_threshold(700, 10, 20)  # 700 is Python's own
    make_collections_rare()
    assert gc.get_threshold() == (10_000, 10, 20)
