"""Braces in urls, expanded as in bash.

`expansion` calls `expand_braces` for each pattern of a dataset. Braces contain either a range, as
in `{000..099}`, or a list of words, as in `{train,val}`.
"""

import os
import re
from itertools import islice
from math import prod

from braceexpand import braceexpand

from shardcache.access.deceptive import checked
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.lists.shardlist import MAX_SHARDS
from shardcache.shared.urls.local_urls import local_path

_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
# NeMo's other spellings of braces: brackets around a range, which is not a glob; `_OP_` and `_CL_`.
_BRACKETED = re.compile(r"\[(-?\d+\.\.-?\d+(?:\.\.-?\d+)?|[A-Za-z]\.\.[A-Za-z])\]")
_WORDED = re.compile(r"_OP_((?:(?!_OP_|_CL_)[^{}])*)_CL_")
# Escaped braces and commas, and the characters that stand for them during the expansion. No url has
# these characters.
_STAND_INS = {"\\{": "\x00", "\\}": "\x01", "\\,": "\x02"}
_BRACES_REMEDY = r"write {000..099} or {a,b}; a brace in a name is written \{ or \}"
_MAX_DIGITS = 18  # maximum number of digits of a number in a range
# Limits, because expansion takes more than linear time in the number of braces, in their depth, and
# in the number of words that they list.
_MAX_BRACES = 32
_MAX_WORD_URLS = 10_000  # maximum number of urls to which the lists of words alone expand


def with_braces(pattern: str) -> str:
    """Return a pattern with braces in place of NeMo's spellings of them.

    These are `[0..9]`, `_OP_0..9_CL_` and `_OP_a,b_CL_`.
    """
    with_ranges = _BRACKETED.sub(r"{\1}", pattern)
    return _WORDED.sub(_braces_of_words, with_ranges)


def _braces_of_words(match: re.Match[str]) -> str:
    """Return the text between `_OP_` and `_CL_` in braces.

    If the text is neither a range nor a list, the whole match is returned unchanged.
    """
    inside = match[1]
    if ".." in inside or "," in inside:
        return f"{{{inside}}}"
    return match[0]


def expand_braces(pattern: str) -> list[str]:
    """Return the urls that a pattern expands to, in the same order as in bash. Blocks.

    Braces after a backslash are characters of the url. The braces in a pattern that is the path of
    an existing local file are characters of its name.

    Raises ConfigError for braces that are unbalanced or do not expand, for a pattern that expands
    to more than `MAX_SHARDS` urls, and for a url that nobody may request.
    """
    checked(pattern)
    braced = with_braces(pattern)
    has_braces = "{" in braced or "}" in braced
    if not has_braces or _is_local_file(pattern):
        return [pattern]
    for escaped, stand_in in _STAND_INS.items():
        braced = braced.replace(escaped, stand_in)
    return [_unescaped(url) for url in _expanded(braced, pattern)]


def _is_local_file(url: str) -> bool:
    """Return whether a text is the path or url of an existing local file."""
    path = local_path(url)
    if path is None:
        return False
    return os.path.isfile(path)  # noqa: PTH113  # it returns False for a text too long for a path


def _unescaped(url: str) -> str:
    """Return a url with the escaped characters, without backslashes, in place of the stand-ins."""
    for escaped, stand_in in _STAND_INS.items():
        url = url.replace(stand_in, escaped.removeprefix("\\"))
    return url


def _expanded(braced: str, pattern: str) -> list[str]:
    """Return the urls that braces expand to. Raises ConfigError, as `expand_braces` does.

    Args:
        braced: the pattern `with_braces`, and with stand-ins in place of escaped characters.
        pattern: the pattern as the user wrote it, which errors name.
    """
    if braced.count("{") > _MAX_BRACES:
        raise ConfigError(
            f"the pattern has more than {_MAX_BRACES} braces",
            url=pattern,
            remedy="split it into several",
        )
    _check_cost(braced, pattern)
    try:
        urls = list(islice(braceexpand(braced, escape=False), MAX_SHARDS + 1))
    except ValueError:
        raise ConfigError("unbalanced braces", url=pattern, remedy=_BRACES_REMEDY) from None
    check_shard_count(len(urls), pattern)
    if any("{" in url or "}" in url for url in urls):
        raise ConfigError("the braces do not expand", url=pattern, remedy=_BRACES_REMEDY)
    return urls


def check_shard_count(shards: int, pattern: str) -> None:
    """Raise ConfigError for more shards than a dataset may have."""
    if shards > MAX_SHARDS:
        raise ConfigError(
            f"it expands to more than {MAX_SHARDS:,} shards",
            url=pattern,
            remedy="write larger shards, or read the dataset in several parts",
        )


def _check_cost(braced: str, pattern: str) -> None:
    """Raise ConfigError for a pattern that would take minutes to expand."""
    ranges = _RANGE.findall(braced)
    for numbers in ranges:
        if any(len(number) > _MAX_DIGITS for number in numbers):
            raise ConfigError("a number in the pattern is too long", url=pattern)

    range_urls = prod(_range_count(start, stop, step) for start, stop, step in ranges)
    word_urls = prod(_word_counts(braced))
    if range_urls > MAX_SHARDS or word_urls > _MAX_WORD_URLS:
        raise ConfigError(
            "the pattern expands to too many shards",
            url=pattern,
            remedy="split it into several",
        )


def _range_count(start: str, stop: str, step: str) -> int:
    """Return the number of integers in a range; a step that is empty or 0 means a step of 1."""
    step_size = max(1, int(step)) if step else 1
    return abs(int(stop) - int(start)) // step_size + 1


def _word_counts(braced: str) -> list[int]:
    """Return the number of words in each pair of outermost braces: one more than its commas.

    The commas of inner braces count as well.
    """
    counts: list[int] = []
    depth = 0
    for char in braced:
        if char == "{":
            depth += 1
            if depth == 1:
                counts.append(1)
        elif char == "}":
            depth = max(0, depth - 1)  # braces may be unbalanced: `_expanded` raises that error
        elif char == "," and depth:
            counts[-1] += 1
    return counts
