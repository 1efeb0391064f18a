"""The garbage collector, kept from holding up the event loop: a full collection looks at every object that there is.

References free nearly all that goes; the collector is there for cycles, which exceptions and their frames make. With
the plans of many sessions in memory, one full collection takes a tenth of a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Full collections come so many times as seldom as Python has them come by itself.
_AS_SELDOM = 10


def collect_seldom() -> None:
    """Have full collections come seldom; young objects are looked through as ever."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, old * _AS_SELDOM)


@contextmanager
def building() -> Iterator[None]:
    """Collect nothing while a block makes many objects that all stay, and look at none of them ever again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
