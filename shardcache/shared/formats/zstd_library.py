"""The library for zstd: Python's own module, or a package with the same interface before 3.14.

The formats import the library through this function only when a file needs it.
"""

import sys
from typing import Any


def zstd_library() -> Any:
    """Return the zstd module. Raises ImportError if the package is needed and not installed."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd
