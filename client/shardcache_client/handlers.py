"""What to do about an error of one shard or one sample: WebDataset's handlers, by the same names and rules.

A handler is called with the error. It returns True to go on without the shard or the sample, False to end the
epoch here as if it were complete, or raises. These work in WebDataset's stages as well, and its own work here;
`reraise` is what it calls `reraise_exception`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from shardcache.errors import ShardcacheError

Handler = Callable[[Exception], bool]


def reraise(exn: Exception) -> bool:
    """Raise the error; the default."""
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Go on as if nothing had happened."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Issue a Python warning and go on."""
    _warn(exn)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End this epoch's reading, silently."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Issue a Python warning and end this epoch's reading."""
    _warn(exn)
    return False


def _warn(exn: Exception) -> None:
    # Only our own errors are sentences; of a KeyError the text is a key, of an AssertionError often nothing.
    warnings.warn(str(exn) if isinstance(exn, ShardcacheError) else repr(exn), stacklevel=3)
