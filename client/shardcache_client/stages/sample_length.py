"""Lengths of samples, from a user's function, for stages that limit a batch's or block's tokens.

A sample that is too long is refused: it raises SampleError, and the dataset's `on_error` decides
whether it is skipped.
"""

from __future__ import annotations

import logging
from typing import Any

from shardcache.shared.exceptions import SampleError
from shardcache_client.arguments.values import plain, shown, whole

log = logging.getLogger("shardcache")


def length_of(sample: Any, value: Any, max_tokens: int) -> int:
    """Return the length of a sample as an int.

    Raises SampleError if the length is above `max_tokens`, or not a whole number.

    Args:
        sample: the sample, for messages.
        value: what the user's function returned for the sample.
        max_tokens: maximum length.
    """
    try:
        # The value may be a scalar of numpy or torch, which `plain` turns into a number.
        length: int = whole().converted(plain(value))
    except (TypeError, ValueError):
        flaw = f"length {shown(value)}, which is not a whole number"
        raise length_error(sample, flaw, "let the function return one") from None
    if length > max_tokens:
        flaw = f"length {shown(length)}, more than max_tokens={max_tokens}"
        raise length_error(sample, flaw, "raise max_tokens")
    return length


def length_error(sample: Any, flaw: str, remedy: str) -> SampleError:
    """Return the error for a sample whose length or tokens are unfit.

    Args:
        sample: the sample. Its key and url are in the error if it is still a dict.
        flaw: the length or tokens, and the reason why they are unfit.
        remedy: advice on how to mend it.
    """
    fields = sample if isinstance(sample, dict) else {}
    key = fields.get("__key__", "")
    return SampleError(f"sample {key!r} has {flaw}", url=fields.get("__url__"), remedy=remedy)


def warn_of_refused(epoch: int, refused: int) -> None:
    """Log the number of samples that were skipped in an epoch for their lengths, if any were."""
    if refused:
        text = (
            "epoch %d: skipped %d samples longer than max_tokens, or of no length, as on_error "
            "decided"
        )
        log.warning(text, epoch, refused)
