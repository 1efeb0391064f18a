"""Globs over urls as regular expressions that match millions of urls quickly, even if the glob is hostile. Pure.

A plain translation backtracks: with seven stars in a pattern, one url takes minutes. Where a star is followed by
another that matches everything it does, the first match of the text between them is as good as any later one, so the
search need never be repeated: an atomic group says so (as in the standard library's fnmatch).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardcache.errors import ConfigError

# In brackets, a "]" that comes first, or first after "!", is one of the characters.
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[(?>!?)(?>\]?)[^\]/]*\]|.", re.DOTALL)
_STARS = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
_LAZY = {"*": "[^/]*?", "**": ".*?", "**/": "(?:.*?/)??"}

# Stars outside atomic groups; each multiplies the work by the length of the url.
_MOST_BACKTRACKING = 3
# No listed url is that long, and a longer glob takes long to parse.
_MOST_CHARS = 2048


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob.

    As in a shell, `*`, `?` and `[...]` stay within one folder, `**` crosses folders and `**/` may match no folder.

    Raises ConfigError for a bracket range that runs backwards, and for a glob that would take too long.
    """
    if len(pattern) > _MOST_CHARS:
        raise ConfigError(f"the glob has more than {_MOST_CHARS} characters", url=pattern[:200])
    tokens = _TOKEN.findall(pattern)
    stars = [at for at, token in enumerate(tokens) if token in _STARS]
    atomic = {at: end for at in stars if (end := _settled_at(tokens, stars, at)) is not None}
    if len(stars) - len(atomic) > _MOST_BACKTRACKING:
        raise ConfigError("the glob has too many `**`", url=pattern[:200], remedy="split it into several")
    try:
        return re.compile("".join(_translated(tokens, atomic)), re.DOTALL)
    except re.error as exn:
        raise ConfigError(f"invalid glob: {exn}", url=pattern[:200]) from None


def _settled_at(tokens: Sequence[str], stars: Sequence[int], at: int) -> int | None:
    """Return the later star up to which the first match is as good as any; None if there is none."""
    later = [star for star in stars if star > at]
    if tokens[at] != "*":
        later = [star for star in later if tokens[star] != "*"]
    if not later:
        return None
    absorbs_all = tokens[later[0]] != "**/" or (tokens[at] != "*" and tokens[later[0] - 1] == "/")
    return later[0] if absorbs_all else None


def _translated(tokens: Sequence[str], atomic: dict[int, int]) -> list[str]:
    parts = [_LAZY[token] if at in atomic else _translate(token) for at, token in enumerate(tokens)]
    for at, end in reversed(atomic.items()):  # a group that ends where the next begins closes before it
        parts[at] = "(?>" + parts[at]
        parts[end] = ")" + parts[end]
    return parts


def _translate(token: str) -> str:
    if token in _STARS:
        return _STARS[token]
    if token == "?":
        return "[^/]"
    if len(token) == 1:
        return re.escape(token)
    chars = re.escape(token[1:-1].removeprefix("!")).replace(r"\-", "-")
    return f"[^/{chars}]" if token.startswith("[!") else f"[{chars}]"
