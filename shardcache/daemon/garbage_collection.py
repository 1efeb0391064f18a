"""Python's garbage collection, tuned so that it hardly ever blocks the event loop.

A full collection, that of the oldest generation, scans all objects of the process.
"""

import contextlib
import gc
from collections.abc import Iterator

_RARER = 10  # factor by which full collections become rarer


def make_full_collections_rare() -> None:
    """Make full collections rare.

    With many plans in memory, each full collection blocks the event loop for a tenth of a second.
    They are hardly needed: reference counting frees all objects except those in cycles, such as
    exceptions and their frames.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * _RARER)


@contextlib.contextmanager
def creating_long_lived_objects() -> Iterator[None]:
    """Disable collection during the block, which creates many objects that will stay.

    All objects that exist at the end of the block are exempt from later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
