"""What urls, brace patterns, globs and prefixes match, of what is here."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from shardcache.origin.listing import expand_braces
from shardcache.origin.urls import is_glob
from shardcache.redact import redact


class Matching:
    """The urls, as they are shown, that any of the patterns stands for; a prefix ends in a slash."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Blocks: a brace pattern may stand for millions. Raises ConfigError."""
        texts = [text for pattern in patterns for text in expand_braces(redact(pattern))]
        self._prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
        self._regexes = [re.compile(fnmatch.translate(text)) for text in texts if is_glob(text)]
        self._urls = frozenset(text for text in texts if not is_glob(text))

    def __contains__(self, url: str) -> bool:
        return (
            url in self._urls
            or url.startswith(self._prefixes)
            or any(regex.match(url) is not None for regex in self._regexes)
        )
