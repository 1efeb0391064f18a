"""Globs over urls, as regular expressions whose time is bounded.

`expansion` matches each url of a listing against such an expression. A star is `*`, `**` or `**/`.
An atomic group, `(?>…)`, is a part of a regular expression whose first match is final: there is no
backtracking into the group to try another match.
"""

import re
from collections.abc import Sequence

from shardcache.shared.exceptions import ConfigError

# Tokens of a glob: stars, question marks, brackets and single characters. In brackets, a "]" that
# comes first, or first after "!", is one of the characters.
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[(?>!?)(?>\]?)[^\]/]*\]|.", re.DOTALL)
_STARS = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
# Stars that begin an atomic group, whose first match has to be the shortest.
_LAZY = {"*": "[^/]*?", "**": ".*?", "**/": "(?:.*?/)??"}

# Maximum number of stars outside of atomic groups. Each of these stars multiplies the work by the
# length of the url.
_MAX_BACKTRACKING = 3
# Maximum length of a glob. No listed url is that long, and a longer glob takes long to parse.
_MAX_GLOB_CHARS = 2048
_SHOWN_CHARS = 200  # number of characters of a glob that errors show


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob.

    As in a shell, `*`, `?` and `[...]` stay within one folder, `**` crosses folders and `**/` may
    match no folder.

    A plain translation backtracks: with seven stars in a pattern, one url takes minutes. If a later
    star matches everything that an earlier star does, the first match of the text between them is
    as good as any later match. The earlier star and that text are then in an atomic group, so that
    no other match is tried. The standard library's fnmatch does the same.

    Raises ConfigError for a bracket range that runs backwards, and for a glob that would take too
    long.
    """
    shown = pattern[:_SHOWN_CHARS]
    if len(pattern) > _MAX_GLOB_CHARS:
        raise ConfigError(f"the glob has more than {_MAX_GLOB_CHARS} characters", url=shown)

    tokens = _TOKEN.findall(pattern)
    stars = [index for index, token in enumerate(tokens) if token in _STARS]
    groups = _atomic_groups(tokens, stars)
    backtracking_stars = len(stars) - len(groups)
    if backtracking_stars > _MAX_BACKTRACKING:
        raise ConfigError("the glob has too many `**`", url=shown, remedy="split it into several")
    regex = _translated(tokens, groups)
    try:
        return re.compile(regex, re.DOTALL)
    except re.error as exn:
        raise ConfigError(f"invalid glob: {exn}", url=shown) from None


def _atomic_groups(tokens: Sequence[str], stars: Sequence[int]) -> dict[int, int]:
    """Return the atomic groups: the index of the token after each group, by that of its first star.

    Args:
        tokens: tokens of the glob.
        stars: indices of the tokens that are stars.
    """
    groups: dict[int, int] = {}
    for star in stars:
        end = _group_end(tokens, stars, star)
        if end is not None:
            groups[star] = end
    return groups


def _group_end(tokens: Sequence[str], stars: Sequence[int], star: int) -> int | None:
    """Return the end of the atomic group that begins with a star; None if there is no such group.

    The group ends before the next star, if that star matches everything that the first one does.
    """
    is_within_folder = tokens[star] == "*"
    later = [other for other in stars if other > star]
    if not is_within_folder:
        # A "*" does not match everything that "**" does, so it cannot end the group.
        later = [other for other in later if tokens[other] != "*"]
    if not later:
        return None

    next_star = later[0]
    if tokens[next_star] != "**/":
        return next_star
    # A "**/" matches only whole folders, so it does not match everything that a "*" does. After a
    # "/", it matches everything that a "**" or "**/" does.
    matches_all = not is_within_folder and tokens[next_star - 1] == "/"
    return next_star if matches_all else None


def _translated(tokens: Sequence[str], groups: dict[int, int]) -> str:
    """Return the regular expression of a glob.

    Args:
        tokens: tokens of the glob.
        groups: the result of `_atomic_groups`.
    """
    regexes: list[str] = []  # of the tokens
    for index, token in enumerate(tokens):
        begins_group = index in groups
        regexes.append(_LAZY[token] if begins_group else _translated_token(token))
    # The groups are marked from the last to the first. If a group ends where the next one begins,
    # its closing parenthesis is thus put before the other's opening parenthesis.
    for begin, end in reversed(groups.items()):
        regexes[begin] = "(?>" + regexes[begin]
        regexes[end] = ")" + regexes[end]
    return "".join(regexes)


def _translated_token(token: str) -> str:
    """Return the regular expression of a token; a star's expression is greedy."""
    if token in _STARS:
        return _STARS[token]
    if token == "?":
        return "[^/]"
    if len(token) == 1:
        return re.escape(token)
    chars = re.escape(token[1:-1].removeprefix("!")).replace(r"\-", "-")
    if token.startswith("[!"):
        return f"[^/{chars}]"
    return f"(?!/)[{chars}]"  # a range such as [+-9] includes the "/"
