"""Python's garbage collection, tuned so that it takes hardly any time of the event loop.

A full collection, that of the oldest generation, scans all objects of the process.
"""

import contextlib
import gc
from collections.abc import Iterator

# A collection begins once so many more objects were created than deleted. Python's own threshold is
# 700, which the requests in flight reach again and again.
_YOUNG_OBJECTS = 10_000


def make_collections_rare() -> None:
    """Make collections rare, those of young objects and thereby full ones.

    They are hardly needed: reference counting frees all objects except those in cycles, such as
    exceptions and their frames. A young collection scans little but the objects of requests in
    flight, in vain: that took 4 % of the time of an event loop that fetched ranges. With many plans
    in memory, each full collection blocks the event loop for a tenth of a second.
    """
    _, middle, old = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, middle, old)


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
