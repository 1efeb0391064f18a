"""Lengths of samples, as a user's function gives them.

They are for stages that bound the tokens of what they make.
"""

from __future__ import annotations

import logging
from typing import Any

from shardcache.errors import SampleError
from shardcache_client.arguments.values import plain, shown, whole

log = logging.getLogger("shardcache")


def length_of(sample: Any, given: Any, max_tokens: int) -> int:
    """Return the length of a sample as an int.

    Raises SampleError if it is too long, or not a whole number.

    Args:
        given: what the user's function has returned for the sample.
    """
    try:
        length: int = whole().converted(plain(given))
    except (TypeError, ValueError):
        what = f"length {shown(given)}, which is not a whole number"
        raise unfit(sample, what, "let the function return one") from None
    if length > max_tokens:
        what = f"length {shown(length)}, more than max_tokens={max_tokens}"
        raise unfit(sample, what, "raise max_tokens")
    return length


def unfit(sample: Any, what: str, remedy: str) -> SampleError:
    """Return the error of a sample that has a length with which nothing can be made of it."""
    fields = sample if isinstance(sample, dict) else {}
    name = fields.get("__key__", "")
    return SampleError(f"sample {name!r} has {what}", url=fields.get("__url__"), remedy=remedy)


def warn_of_refused(epoch: int, refused: int) -> None:
    """Log the number of samples that an epoch lacks for their lengths, if there are any."""
    if refused:
        text = (
            "epoch %d: skipped %d samples longer than max_tokens, or of no length, as on_error "
            "decided"
        )
        log.warning(text, epoch, refused)
