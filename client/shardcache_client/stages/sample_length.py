"""Lengths of samples, as a user's function gives them, for stages that bound the tokens of what they make."""

from __future__ import annotations

from typing import Any

from shardcache.errors import SampleError
from shardcache_client.arguments import plain, whole


def length_of(sample: Any, given: Any, max_tokens: int) -> int:
    """Return the length of a sample as an int. Raises SampleError if it is too long, or not a whole number.

    Args:
        given: what the user's function has returned for the sample.
    """
    try:
        length: int = whole().converted(plain(given))
    except (TypeError, ValueError):
        raise unfit(sample, f"length {given!r}, which is not a whole number", "let the function return one") from None
    if length > max_tokens:
        raise unfit(sample, f"length {length}, more than max_tokens={max_tokens}", "raise max_tokens")
    return length


def unfit(sample: Any, what: str, remedy: str) -> SampleError:
    """Return the error of a sample that has a length with which nothing can be made of it."""
    fields = sample if isinstance(sample, dict) else {}
    name = fields.get("__key__", "")
    return SampleError(f"sample {name!r} has {what}", url=fields.get("__url__"), remedy=remedy)
