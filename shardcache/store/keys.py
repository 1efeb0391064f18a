"""Cache keys: names of a shard's files in the cache folder."""

import hashlib

from shardcache.redact import redact
from shardcache.shared.urls.signed_urls import is_signed, without_signature
from shardcache.shared.urls.url_names import is_stored_as_is

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
    """Return the url, or other text, under which a shard or file is cached.

    It is the url, with two exceptions, whose texts are no possible urls:

    1. The own bytes of a shard that is cached in another form, such as decompressed.
    2. A signed url: all signatures of one object have one place. The url without a signature has
       another one, since a signature permits nothing to those who do not have it.
    """
    place = url
    if is_signed(url):
        place = f"{without_signature(url)}\0signed"
    if is_file and not is_stored_as_is(url):
        return f"{place}\0"
    return place


def stored_url(url: str) -> str:
    """Return a url as it is stored and shown: without a signature or any other secret."""
    return redact(without_signature(url))
