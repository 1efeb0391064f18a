"""Garbage collection that hardly ever stops the event loop."""

import contextlib
import gc
from collections.abc import Iterator

_FULL_COLLECTIONS_RARER = 10  # factor


def collect_seldom() -> None:
    """Make full garbage collections rare.

    With many plans in memory, each of them blocks the event loop for a tenth of a second. Reference
    counting frees nearly everything but cycles, such as those of exceptions and their frames.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * _FULL_COLLECTIONS_RARER)


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Disable collection while a block creates many long-lived objects.

    These are then exempt from all later collections.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
