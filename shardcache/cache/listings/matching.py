"""Patterns of users, matched against the urls of cached shards.

The commands that evict and unpin shards find them with a matcher, without asking an origin. A
stored url is a url in the form in which the cache keeps it: without secrets, such as a signature.
"""

from collections.abc import Callable, Sequence

from shardcache.access.urls import canonical, is_glob
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.globs import glob_regex
from shardcache.shared.tarindex.key_splits import key_split_in
from shardcache.store.keys import stored_url


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate that is True for a stored url that any of the patterns matches.

    Patterns match as they do in `expansion`, which resolves patterns for readers. Blocks, since a
    pattern with braces may expand to millions of urls. Raises ConfigError.
    """
    texts: list[str] = []
    for pattern in patterns:
        texts.extend(map(canonical, expand_braces(_stored_form(pattern))))
    prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
    globs = [glob_regex(text) for text in texts if is_glob(text)]
    urls = frozenset(texts)  # with the globs, since a url may contain the characters of a glob

    def matches(url: str) -> bool:
        text = canonical(_stored_form(url))
        if text in urls or text.startswith(prefixes):
            return True
        return any(glob.fullmatch(text) for glob in globs)

    return matches


def _stored_form(url: str) -> str:
    """Return a url or pattern without secrets, and without its key split (`key_splits`)."""
    without_key_split, _ = key_split_in(url)
    return stored_url(without_key_split)
