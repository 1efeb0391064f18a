"""lock_probe.py: whether work holds Python's global lock, whatever else the machine does."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shardcache_client.loading.lock_probe import LockProbe, LockUse

SAMPLES = 30

needs_global_lock = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="this Python has no global lock"
)


def probes() -> list[threading.Thread]:
    """Return the threads of probes."""
    return [thread for thread in threading.enumerate() if thread.name == "shardcache-probe"]


@pytest.fixture
def probe() -> Iterator[LockProbe]:
    """A probe that takes some samples."""
    made = LockProbe(SAMPLES)
    yield made
    made.close()


def share_of(probe: LockProbe, work: Callable[[], object]) -> float:
    """Return the share of the work's time in which the lock was held."""
    use = LockUse()
    while use.samples < SAMPLES:
        probe.begin()
        work()
        use += probe.end()
    return use.share


@needs_global_lock
def test_work_in_python_holds_the_lock(probe: LockProbe) -> None:
    """All the time, but for what the probe takes; far more than half of it."""
    assert share_of(probe, lambda: sum(range(300_000))) > 0.5


def test_work_without_the_lock_does_not_hold_it(probe: LockProbe) -> None:
    """Far less than half of the time."""
    assert share_of(probe, lambda: time.sleep(0.02)) < 0.5


def test_first_piece_of_work_is_not_sampled(probe: LockProbe) -> None:
    """Not even a thread is started for it."""
    before = probes()
    probe.begin()
    assert probes() == before
    assert probe.end() == LockUse()


def test_thread_ends_with_its_probe() -> None:
    """Also one that has samples left to take."""
    before = probes()
    probe = LockProbe(1_000_000)
    probe.begin()
    probe.begin()
    assert len(probes()) == len(before) + 1
    probe.close()
    assert probes() == before


def test_probe_of_no_samples_has_no_thread() -> None:
    """It has nothing to decide."""
    before = probes()
    probe = LockProbe(0)
    probe.begin()
    probe.begin()
    assert probes() == before
    assert probe.end() == LockUse()
    probe.close()
