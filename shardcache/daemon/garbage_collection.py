"""Garbage collection that hardly ever stops the event loop.

A full collection scans all objects of the process; it is the collection of Python's oldest
generation.
"""

import contextlib
import gc
from collections.abc import Iterator

_FULL_COLLECTIONS_RARER = 10  # factor by which full collections become rarer


def collect_seldom() -> None:
    """Make full garbage collections rare.

    With many plans in memory, each full collection blocks the event loop for a tenth of a second.
    They are hardly needed: reference counting frees all objects except those in cycles, such as
    exceptions and their frames.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * _FULL_COLLECTIONS_RARER)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Disable collection while a block creates many long-lived objects.

    All objects that exist at the end of the block are exempt from later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
