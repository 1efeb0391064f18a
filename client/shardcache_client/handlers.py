"""Handlers for errors of a single shard or sample, with the names and rules of WebDataset's.

A handler is called with the error. It returns True to skip the shard or sample, False to end the
epoch there as if it were complete, or raises an error. These handlers also work in WebDataset's
stages, and WebDataset's handlers work here. Each can be given by its name, such as
`on_error="warn_and_continue"`; "warn" stands for that handler, "ignore" for "ignore_and_continue",
and "raise" for "reraise".

A reader with "warn_and_continue" warns of the first five errors of an epoch, and logs the number of
errors at the end of the epoch.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from shardcache.shared.exceptions import SampleError, ShardcacheError

Handler = Callable[[Exception], bool]

_MAX_WARNINGS = 5  # maximum number of warnings in each epoch of a reader
_ADVICE = 'on_error="warn" skips such samples'


def reraise(exn: Exception) -> bool:
    """Raise the error. The default handler.

    A sample's error also gets the advice how to skip such samples.
    """
    # An error that passes through two handlers gets the advice only once.
    if isinstance(exn, SampleError) and _ADVICE not in exn.remedy:
        exn.remedy = f"{exn.remedy}; {_ADVICE}" if exn.remedy else _ADVICE
    raise exn


def ignore_and_continue(exn: Exception) -> bool:
    """Skip the shard or sample silently."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Issue a Python warning and skip the shard or sample."""
    _warn(exn)
    return True


def ignore_and_stop(exn: Exception) -> bool:
    """End the epoch silently."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Issue a Python warning and end the epoch."""
    _warn(exn)
    return False


def _warn(exn: Exception, further: str = "") -> None:
    """Issue a warning with the error's text, and further text after it."""
    # The errors of shardcache are sentences. Other errors need their type: the text of a KeyError
    # is just a key, and the text of an AssertionError is often empty.
    text = str(exn) if isinstance(exn, ShardcacheError) else repr(exn)
    warnings.warn(text + further, stacklevel=3)  # 3: the warning names the handler's caller


@dataclass(slots=True)
class _FirstWarnings:
    """`warn_and_continue` for a single epoch, silent after the first errors.

    The reader that calls this handler counts the skipped shards and samples, and logs their number.

    Attributes:
        errors: number of errors so far in the epoch.
    """

    errors: int = 0

    def __call__(self, exn: Exception) -> bool:
        """Skip the shard or sample, and issue a warning unless too many were issued already."""
        self.errors += 1
        if self.errors < _MAX_WARNINGS:
            _warn(exn)
        elif self.errors == _MAX_WARNINGS:
            _warn(
                exn,
                "\n  No further warnings in this epoch: how many there were is logged at its end.",
            )
        return True


def for_epoch(handler: Handler) -> Handler:
    """Return the handler for one reader's epoch.

    This is the same handler; but in place of `warn_and_continue`, it is a handler that does the
    same and warns only of the first errors.
    """
    if handler is warn_and_continue:
        return _FirstWarnings()
    return handler


_BY_NAME = {
    handler.__name__: handler
    for handler in (reraise, warn_and_continue, ignore_and_continue, warn_and_stop, ignore_and_stop)
}
_BY_NAME |= {
    "warn": warn_and_continue,
    "ignore": ignore_and_continue,
    "raise": reraise,
    "reraise_exception": reraise,
}

ANY_HANDLER = f"a function of the error, or the name of a handler: {', '.join(_BY_NAME)}"


def handler_of(handler: Handler | str) -> Handler:
    """Return a handler, which may be given by its name.

    Raises TypeError or ValueError without a message for any other value: the check of arguments
    describes the accepted values by `ANY_HANDLER`.
    """
    if isinstance(handler, str):
        if handler not in _BY_NAME:
            raise ValueError
        return _BY_NAME[handler]
    if not callable(handler):
        raise TypeError
    return handler
