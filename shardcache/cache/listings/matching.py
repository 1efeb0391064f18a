"""Patterns of users, matched against the urls of cached shards.

The commands that evict and unpin find their shards by this, without asking an origin. A stored url
is one as the cache keeps it: without secrets, such as a signature.
"""

from collections.abc import Callable, Sequence

from shardcache.access.urls import canonical, is_glob
from shardcache.origin.patterns.braces import expand_braces
from shardcache.origin.patterns.globs import glob_regex
from shardcache.store.keys import stored_url
from shardcache.tarindex.key_splits import key_split_in


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate: does a stored url match any of the patterns?

    Patterns match as they do in `expansion`, which resolves patterns for readers.

    Blocks, as a pattern with braces may expand to millions of urls. Raises ConfigError.
    """
    expanded = (text for pattern in patterns for text in expand_braces(_stored(pattern)))
    texts = list(map(canonical, expanded))
    prefixes = tuple(text for text in texts if text.endswith("/") and not is_glob(text))
    globs = [glob_regex(text) for text in texts if is_glob(text)]
    urls = frozenset(texts)  # globs are among them, as a url may contain a glob's characters

    def matches(url: str) -> bool:
        text = canonical(_stored(url))
        if text in urls or text.startswith(prefixes):
            return True
        return any(glob.fullmatch(text) for glob in globs)

    return matches


def _stored(url: str) -> str:
    """Return a url or pattern without secrets, and without its suffix that selects sample keys."""
    objects, _ = key_split_in(url)
    return stored_url(objects)
