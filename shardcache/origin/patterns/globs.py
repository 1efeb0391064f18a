"""Globs over urls, as regular expressions that take linear time."""

import re
from collections.abc import Sequence

from shardcache.errors import ConfigError

# In brackets, a "]" that comes first, or first after "!", is one of the characters.
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[(?>!?)(?>\]?)[^\]/]*\]|.", re.DOTALL)
_STARS = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
_LAZY = {"*": "[^/]*?", "**": ".*?", "**/": "(?:.*?/)??"}

# Stars outside atomic groups; each multiplies the work by the length of the url.
_MAX_BACKTRACKING = 3
_MAX_GLOB_CHARS = 2048  # no listed url is that long, and a longer glob takes long to parse
_SHOWN_CHARS = 200


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob.

    As in a shell, `*`, `?` and `[...]` stay within one folder, `**` crosses folders and `**/` may
    match no folder.

    A plain translation backtracks: with seven stars in a pattern, one url takes minutes. Where a
    star is followed by another that matches everything it does, the first match of the text between
    them is as good as any later one: an atomic group says so, as in the standard library's fnmatch.

    Raises ConfigError for a bracket range that runs backwards, and for a glob that would take too
    long.
    """
    shown = pattern[:_SHOWN_CHARS]
    if len(pattern) > _MAX_GLOB_CHARS:
        raise ConfigError(f"the glob has more than {_MAX_GLOB_CHARS} characters", url=shown)

    tokens = _TOKEN.findall(pattern)
    stars = [at for at, token in enumerate(tokens) if token in _STARS]
    atomic = _atomic_groups(tokens, stars)
    if len(stars) - len(atomic) > _MAX_BACKTRACKING:
        raise ConfigError("the glob has too many `**`", url=shown, remedy="split it into several")
    try:
        return re.compile("".join(_translated(tokens, atomic)), re.DOTALL)
    except re.error as exn:
        raise ConfigError(f"invalid glob: {exn}", url=shown) from None


def _atomic_groups(tokens: Sequence[str], stars: Sequence[int]) -> dict[int, int]:
    """Return where groups begin and end in which the first match is as good as any."""
    groups: dict[int, int] = {}
    for at in stars:
        end = _settled_at(tokens, stars, at)
        if end is not None:
            groups[at] = end
    return groups


def _settled_at(tokens: Sequence[str], stars: Sequence[int], at: int) -> int | None:
    """Return the later star up to which the first match is as good as any; None without one."""
    later = [star for star in stars if star > at]
    if tokens[at] != "*":
        # A "*" does not match everything that "**" does.
        later = [star for star in later if tokens[star] != "*"]
    if not later:
        return None

    next_star = later[0]
    if tokens[next_star] != "**/":
        return next_star
    # "**/" begins only after a "/".
    absorbs_all = tokens[at] != "*" and tokens[next_star - 1] == "/"
    return next_star if absorbs_all else None


def _translated(tokens: Sequence[str], atomic: dict[int, int]) -> list[str]:
    """Return the regular expression of each token, with the parentheses of atomic groups."""
    parts = [_LAZY[token] if at in atomic else _translate(token) for at, token in enumerate(tokens)]
    for at, end in reversed(atomic.items()):  # a group that ends where the next begins closes first
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
    if token.startswith("[!"):
        return f"[^/{chars}]"
    return f"[{chars}]"
