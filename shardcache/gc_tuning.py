"""Garbage collector tuning: full collections scan every object and would block the event loop.

Reference counting frees nearly everything; the collector is needed only for cycles, which exceptions and their frames
create. With the plans of many sessions in memory, a full collection takes a tenth of a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Factor by which full collections are rarer than by Python's default.
_AS_SELDOM = 10


def collect_seldom() -> None:
    """Make full collections rare; young generations are collected as usual."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * _AS_SELDOM)


@contextmanager
def building() -> Iterator[None]:
    """Disable collection while a block creates many long-lived objects, then exempt them from all later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
