"""Cache keys: the names of a shard's files in the cache folder.

A key is a hash of a shard's place and version. The place is the shard's url, except for shards that
are cached in two forms and for signed urls (see `place_of`).
"""

import hashlib

from shardcache.shared.urls.signed_urls import is_signed, without_signature
from shardcache.shared.urls.url_names import is_stored_as_is
from shardcache.shared.wording.redact import redact

KEY_CHARS = 32

# Suffixes of places that are not urls (see `place_of`).
_SIGNED = "\0signed"
_OWN_BYTES = "\0"


def shard_key(url: str, version: str) -> str:
    """Return the cache key of one version of one shard: a hash of url and version."""
    return hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:KEY_CHARS]


def is_key(name: str) -> bool:
    """Return whether a file's stem has the form of a cache key.

    Files with other names are not the daemon's: it never touches them.
    """
    return len(name) == KEY_CHARS and all(char in "0123456789abcdef" for char in name)


def place_of(url: str, *, is_file: bool) -> str:
    """Return the url, or other text, under which a shard or file is cached.

    The place is the url itself, with two exceptions. In both cases, the place contains a null
    character, so it cannot be the url of another shard:

    1. The object's own bytes, if shards are cached in another form, such as decompressed.
    2. A signed url. All signed urls of one object have the same place, whatever the signature. The
       url without a signature has another place, as users without a signature must not get what a
       signature permits.

    Args:
        is_file: True for the object's own bytes, False for the form in which shards are cached.
    """
    place = url
    if is_signed(url):
        place = without_signature(url) + _SIGNED
    if is_file and not is_stored_as_is(url):
        place += _OWN_BYTES
    return place


def is_key_of_own_bytes(key: str, url: str, version: str) -> bool:
    """Return whether a key is that of an object's own bytes, and shards are cached in another form.

    Args:
        key: the key.
        url: the object's url, as `stored_url` returns it.
        version: the object's version.
    """
    if is_stored_as_is(url):
        return False
    places = (f"{url}{_OWN_BYTES}", f"{url}{_SIGNED}{_OWN_BYTES}")
    return any(key == shard_key(place, version) for place in places)


def file_key(url: str, version: str) -> str:
    """Return the cache key of an object's own bytes."""
    return shard_key(place_of(url, is_file=True), version)


def stored_url(url: str) -> str:
    """Return a url as it is stored and shown: without a signature or any other secret."""
    return redact(without_signature(url))
