"""The library for zstd: Python's own, or before 3.14 a package with the same interface."""

import sys
from typing import Any


def zstd_library() -> Any:
    """Return the module. Raises ImportError, where the package is not installed."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd
