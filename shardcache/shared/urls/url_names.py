"""Names of objects: their suffixes tell shards, with format and compression, and index files.

Lists of shards that other programs write are index files, too.

A name is the path of a url, without the query of a web url, or the version of an object in S3.
"""

import re

from shardcache.formats import table
from shardcache.formats.format import Format
from shardcache.formats.tar import TAR
from shardcache.tarindex.key_splits import key_split_in

INDEX_SUFFIX = ".json"
"""Suffix of the indexes that shardcache writes."""

_LIST_SUFFIX = ".list"
_YAML_NAMES = ("/.info.yaml", "/split.yaml")
_LISTS = (INDEX_SUFFIX, _LIST_SUFFIX, *_YAML_NAMES)

_WEB = re.compile(r"https?://", re.IGNORECASE)
_QUERY = re.compile(r"[?#]")
_VERSIONED = re.compile(r"((?i:s3a?)://.+)\?versionId=([^?&#/*\[\]]+)")


def path_of(url: str) -> str:
    """Return a url without the query and fragment of a web url, or the version of one of S3.

    In other urls, `?` and `#` are part of the name, unless they say where keys end: see
    `key_splits`.
    """
    url, _ = key_split_in(url)
    if not _WEB.match(url):
        path, _ = version_in(url)
        return path
    path, *_ = _QUERY.split(url, maxsplit=1)
    return path


def version_in(url: str) -> tuple[str, str]:
    """Return a url of S3 without `?versionId=ID`, and this id; any other url, and no id."""
    found = _VERSIONED.fullmatch(url) if "?" in url else None  # of millions of urls, few have any
    if found is None:
        return url, ""
    return found[1], found[2]


def is_shard(url: str) -> bool:
    """Return whether an object has a shard's name, of any format."""
    return table.suffix_of(path_of(url)) is not None


def is_tar(url: str) -> bool:
    """Return whether an object has a tar's name, plain or compressed."""
    found = table.suffix_of(path_of(url))
    return found is not None and found[1] is TAR


def is_tar_or_unnamed(url: str) -> bool:
    """Return whether the samples of an object are read as those of a tar."""
    return format_of(url) is TAR


def is_shard_or_file(url: str) -> bool:
    """Return whether an object counts as a shard where both shards and files are wanted.

    An object whose format other programs read as often counts as a file there.
    """
    found = table.suffix_of(path_of(url))
    return found is not None and not found[1].is_often_a_file


def may_be_a_file(url: str) -> bool:
    """Return whether objects of a url's format are read by other programs as often as by datasets.

    Args:
        url: or a pattern.
    """
    found = table.suffix_of(path_of(url))
    return found is not None and found[1].is_often_a_file


def format_of(url: str) -> Format:
    """Return the format of a shard; tar unless its name says another."""
    return table.format_of(path_of(url))


def split_of(index: str) -> tuple[str, str | None]:
    """Return the url of an index file, and the split that is named behind it, as in `#train`."""
    index, _ = key_split_in(index)
    url, mark, split = index.rpartition("#")
    if mark and "/" not in split and path_of(url).lower().endswith(_LISTS):
        return url, split
    return index, None


def is_index(url: str) -> bool:
    """Return whether an object has the name of an index file, or of a list that others write."""
    file, _ = split_of(url)
    return path_of(file).lower().endswith(_LISTS)


def is_yaml(index: str) -> bool:
    """Return whether an index file is YAML."""
    return path_of(index).lower().endswith(_YAML_NAMES)


def may_name_index(pattern: str) -> bool:
    """Return whether a pattern may expand to the url of an index file."""
    return any(suffix in pattern.lower() for suffix in _LISTS)


def compression_of(url: str) -> str | None:
    """Return the compression that a shard's name states.

    None for a plain shard and any other file.
    """
    return table.compression_of(path_of(url))


def is_stored_as_is(url: str) -> bool:
    """Return whether the cached file of a shard always has the object's own bytes."""
    found = table.suffix_of(path_of(url))
    if found is None:
        return True
    suffix, format_ = found
    return format_.suffixes[suffix] is None and not format_.repacks


def plain_name(name: str) -> str:
    """Return the name of a compressed shard without its compression, others unchanged."""
    found = table.suffix_of(name)
    if found is None:
        return name
    suffix, format_ = found
    if format_.suffixes[suffix] is None:
        return name
    return name[: -len(suffix)] + table.plain_suffix(format_)


def beside_index(index: str, suffix: str) -> str:
    """Return the url of the file that has another suffix in place of an index file's.

    A query stays. The version of an object in S3 does not: another object has none of that id.
    """
    file, _ = split_of(index)
    file, _ = version_in(file)
    path = path_of(file)
    query = file[len(path) :]
    stem, _, _ = path.rpartition(".")
    return stem + suffix + query
