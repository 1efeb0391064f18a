"""The library for zstd: Python's own from 3.14 on, and before that a package like it."""

import sys
from typing import Any


def zstd_library() -> Any:
    """Return the zstd module. Raises ImportError if the package is needed and not installed."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd
