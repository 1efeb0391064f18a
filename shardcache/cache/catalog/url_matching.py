"""Matching of cached or pinned urls against urls, brace patterns, globs and prefixes, by the rules of `expand`."""

from __future__ import annotations

from collections.abc import Sequence

from shardcache.access.urls import is_glob
from shardcache.origin.listing import expand_braces, glob_regex
from shardcache.redact import redact


class Matching:
    """The set of redacted urls that match any of the patterns; a prefix ends in a slash."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Expand the patterns. Blocks: a brace pattern may expand to millions of urls. Raises ConfigError."""
        texts = [text for pattern in patterns for text in expand_braces(redact(pattern))]
        self._prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
        self._globs = [glob_regex(text) for text in texts if is_glob(text)]
        self._urls = frozenset(text for text in texts if not is_glob(text))

    def __contains__(self, url: str) -> bool:
        return (
            url in self._urls
            or url.startswith(self._prefixes)
            or any(glob.fullmatch(url) is not None for glob in self._globs)
        )
