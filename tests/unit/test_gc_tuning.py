"""gc_tuning.py: what the garbage collector is spared."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from shardcache import gc_tuning as garbage


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Leave this process's collector as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_what_is_built_is_not_looked_at_again() -> None:
    """Nothing is collected meanwhile, and what was made is in no generation afterwards."""
    with garbage.building():
        assert not gc.isenabled()
        built = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(built)
    assert not any(each is built for each in gc.get_objects())


def test_only_full_collections_become_seldom() -> None:
    """Young garbage, which is most of it, goes as soon as ever."""
    young, middle, old = gc.get_threshold()
    garbage.collect_seldom()
    assert gc.get_threshold()[:2] == (young, middle)
    assert gc.get_threshold()[2] > old
