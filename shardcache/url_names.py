"""Names of objects: a url's path without its query, and what its suffix says: a shard, its compression, or an index."""

import re

INDEX_SUFFIX = ".json"

_COMPRESSIONS = {
    ".tar": None,
    ".tar.gz": "gzip",
    ".tgz": "gzip",
    ".tar.zst": "zstd",
    ".tar.zstd": "zstd",
    ".tzst": "zstd",
    ".tzstd": "zstd",
    ".tar.bz2": "bzip2",
    ".tbz2": "bzip2",
    ".tbz": "bzip2",
    ".tb2": "bzip2",
    ".tar.xz": "xz",
    ".txz": "xz",
}
SHARD_SUFFIXES = tuple(_COMPRESSIONS)
"""Suffixes of shards in lower case; names have them in any case."""

_COMPRESSED_SUFFIXES = tuple(suffix for suffix, compression in _COMPRESSIONS.items() if compression)
_WEB = re.compile(r"https?://", re.IGNORECASE)
_QUERY = re.compile(r"[?#]")


def path_of(url: str) -> str:
    """Return a url without the query and fragment of a web url; elsewhere, `?` and `#` are part of a name."""
    return _QUERY.split(url, maxsplit=1)[0] if _WEB.match(url) else url


def is_shard(url: str) -> bool:
    """Return whether an object has a shard's name."""
    return path_of(url).lower().endswith(SHARD_SUFFIXES)


def is_index(url: str) -> bool:
    """Return whether an object has an index file's name."""
    return path_of(url).lower().endswith(INDEX_SUFFIX)


def compression_of(url: str) -> str | None:
    """Return the compression that a shard's name states; None for a plain tar and any other file."""
    name = path_of(url).lower()
    return next((_COMPRESSIONS[suffix] for suffix in _COMPRESSED_SUFFIXES if name.endswith(suffix)), None)


def without_compression(name: str) -> str:
    """Return the name of a compressed shard without its suffix."""
    suffix = next((suffix for suffix in _COMPRESSED_SUFFIXES if name.lower().endswith(suffix)), "")
    return name.removesuffix(name[len(name) - len(suffix) :])


def beside_index(index: str, suffix: str) -> str:
    """Return the url of the file that has another suffix in place of an index file's; a query stays."""
    path = path_of(index)
    query = index[len(path) :]
    return path[: -len(INDEX_SUFFIX)] + suffix + query
