"""Patterns of users, matched against the urls of cached shards."""

from collections.abc import Callable, Sequence

from shardcache.access.urls import canonical, is_glob
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.globs import glob_regex
from shardcache.store.keys import stored_url
from shardcache.tarindex.key_splits import key_split_in


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: does a stored url match any of the patterns, by the rules of `expand`?

    Blocks: a brace pattern may expand to millions of urls. Raises ConfigError.
    """
    expanded = (text for pattern in patterns for text in expand_braces(_stored(pattern)))
    texts = list(map(canonical, expanded))
    prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
    globs = [glob_regex(text) for text in texts if is_glob(text)]
    urls = frozenset(texts)  # a url may have the characters of a glob in its name

    def matches(url: str) -> bool:
        place = canonical(_stored(url))
        if place in urls or place.startswith(prefixes):
            return True
        return any(glob.fullmatch(place) for glob in globs)

    return matches


def _stored(url: str) -> str:
    """Return a url or pattern without secrets, and without the part that selects keys."""
    objects, _ = key_split_in(url)
    return stored_url(objects)
