"""Garbage collections that the daemon spares itself, as the collector itself reports them."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardcache import daemon

MANY = 200_000


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Begin with Python's own thresholds, and leave this process's collector as it was."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@contextmanager
def collections() -> Iterator[Counter[int]]:
    """Count the collections by their generation: 0 of the youngest objects, 2 of all."""
    seen: Counter[int] = Counter()

    def note(phase: str, info: dict[str, Any]) -> None:
        seen[info["generation"]] += phase == "start"

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def test_nothing_is_collected_while_much_is_built_nor_is_it_looked_at_afterwards() -> None:
    """Objects made then are in no generation, so that no collection traverses them."""
    with daemon.building(), collections() as seen:
        built = [[number] for number in range(MANY)]
    assert not seen
    assert gc.isenabled()
    assert len(gc.get_objects()) < len(built)


def test_only_full_collections_become_seldom() -> None:
    """Young garbage, which is most of it, goes as soon as ever."""

    def work() -> Counter[int]:
        gc.freeze()  # full collections are also the rarer the more there is: only the work's own objects count
        gc.collect()
        with collections() as seen:
            kept = [[number] for number in range(MANY)]
        assert len(kept) == MANY
        return seen

    usual = work()
    daemon.collect_seldom()
    seldom = work()
    assert usual[2] > seldom[2] == 0
    assert seldom[0] + seldom[1] >= usual[0] + usual[1] > 0
