"""Cache keys: names of a shard's files in the cache folder."""

import hashlib

from shardcache.shared.url_names import is_stored_as_is

KEY_CHARS = 32


def shard_key(url: str, version: str) -> str:
    """Return the cache key of one version of one shard: a hash of url and version."""
    return hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:KEY_CHARS]


def is_key(name: str) -> bool:
    """Return True if a file's stem has the form of a cache key.

    Other files in the folder are never touched.
    """
    return len(name) == KEY_CHARS and all(char in "0123456789abcdef" for char in name)


def place_of(url: str, *, is_file: bool) -> str:
    """Return the url, or other text, that a shard or file is cached under.

    It is the url, except for the own bytes of a shard that is cached in another form: no url is
    like theirs.
    """
    if is_file and not is_stored_as_is(url):
        return f"{url}\0"
    return url
