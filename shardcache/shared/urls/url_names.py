"""Names of objects: their suffixes state whether they are shards, of which format, or index files.

An index file lists shards; it may be a list that another program has written. A name is the path of
a url: it includes neither the query of a web url nor the version in an S3 url (`?versionId=ID`). A
key split is the mark `#key_split=last-dot` at the end of a url, by which a user says how the names
in a tar are split into keys and fields. A split is a mark such as `#train` at the end of an index
file's url; it names a part of the list, such as the shards for training.
"""

import re

from shardcache.shared.formats import format_table
from shardcache.shared.formats.format import Format
from shardcache.shared.formats.tar import TAR
from shardcache.shared.tarindex.key_splits import key_split_in

INDEX_SUFFIX = ".json"
"""Suffix of the indexes that shardcache writes."""

_LIST_SUFFIX = ".list"  # of WeNet's lists
_YAML_NAMES = ("/.info.yaml", "/split.yaml")  # of Energon's lists
_INDEX_ENDINGS = (INDEX_SUFFIX, _LIST_SUFFIX, *_YAML_NAMES)

_WEB = re.compile(r"https?://", re.IGNORECASE)
_QUERY = re.compile(r"[?#]")
# An S3 url and its version. A url with `*` or brackets after the `?` is a pattern: the `?` then
# stands for any character.
_VERSIONED = re.compile(r"((?i:s3a?)://.+)\?versionId=([^?&#/*\[\]]+)")


def path_of(url: str) -> str:
    """Return a web url without its query and fragment, or an S3 url without its version.

    In other urls, `?` and `#` are part of the name. The key split is left out of every url.
    """
    url, _ = key_split_in(url)
    if not _WEB.match(url):
        path, _ = version_in(url)
        return path
    path, *_ = _QUERY.split(url, maxsplit=1)
    return path


def version_in(url: str) -> tuple[str, str]:
    """Return an S3 url without `?versionId=ID`, and the id.

    Any other url is returned unchanged, with an empty id.
    """
    if "?" not in url:  # a fast path for nearly all urls, of which there may be millions
        return url, ""
    match = _VERSIONED.fullmatch(url)
    if match is None:
        return url, ""
    path, version = match.groups()
    return path, version


def is_shard(url: str) -> bool:
    """Return whether an object has a shard's name, of any format."""
    return format_table.suffix_and_format(path_of(url)) is not None


def is_tar(url: str) -> bool:
    """Return whether an object has a tar's name, plain or compressed."""
    return _named_format(url) is TAR


def is_tar_or_unnamed(url: str) -> bool:
    """Return whether an object is read as a tar, because its name states tar or no format."""
    return format_of(url) is TAR


def is_surely_a_shard(url: str) -> bool:
    """Return whether an object has a shard's name, of a format that is rare outside of datasets.

    JSON Lines, for example, are as common outside of datasets.
    """
    format_ = _named_format(url)
    return format_ is not None and not format_.is_common_outside_datasets


def is_common_outside_datasets(url: str) -> bool:
    """Return whether files of a url's format are as common outside of datasets as in them.

    Args:
        url: a url or a pattern.
    """
    format_ = _named_format(url)
    return format_ is not None and format_.is_common_outside_datasets


def format_of(url: str) -> Format:
    """Return the format of a shard; tar unless the shard's name states another format."""
    return format_table.format_of(path_of(url))


def split_of(index: str) -> tuple[str, str | None]:
    """Return an index file's url without its split, and the split; None if the url has none."""
    index, _ = key_split_in(index)
    url, mark, split = index.rpartition("#")
    if mark and "/" not in split and path_of(url).lower().endswith(_INDEX_ENDINGS):
        return url, split
    return index, None


def is_index(url: str) -> bool:
    """Return whether an object has the name of an index file."""
    file, _ = split_of(url)
    return path_of(file).lower().endswith(_INDEX_ENDINGS)


def is_yaml(index: str) -> bool:
    """Return whether an index file is YAML."""
    return path_of(index).lower().endswith(_YAML_NAMES)


def may_name_index(pattern: str) -> bool:
    """Return whether a pattern may expand to the url of an index file."""
    return any(ending in pattern.lower() for ending in _INDEX_ENDINGS)


def compression_of(url: str) -> str | None:
    """Return the compression that a shard's name states.

    Return None for a shard that is not compressed, and for a file that is not a shard.
    """
    return format_table.compression_of(path_of(url))


def is_stored_as_is(url: str) -> bool:
    """Return whether an object's cached file has the object's own bytes.

    The files of compressed shards have other bytes, and so have those of formats that are repacked.
    """
    named = format_table.suffix_and_format(path_of(url))
    if named is None:
        return True
    suffix, format_ = named
    is_compressed = format_.suffixes[suffix] is not None
    return not is_compressed and not format_.may_repack


def plain_name(name: str) -> str:
    """Return the name that a compressed shard has when it is decompressed.

    Other names are returned unchanged.
    """
    named = format_table.suffix_and_format(name)
    if named is None:
        return name
    suffix, format_ = named
    if format_.suffixes[suffix] is None:  # not compressed
        return name
    return name[: -len(suffix)] + format_table.plain_suffix(format_)


def beside_index(index: str, suffix: str) -> str:
    """Return the url of the file that has an index file's name with another suffix.

    A query is kept, but not an S3 version, because the other object has versions of its own.
    """
    file, _ = split_of(index)
    file, _ = version_in(file)
    path = path_of(file)
    query = file[len(path) :]
    stem, _, _ = path.rpartition(".")
    return stem + suffix + query


def _named_format(url: str) -> Format | None:
    """Return the format that an object's suffix names; None if the suffix is not a shard's."""
    named = format_table.suffix_and_format(path_of(url))
    if named is None:
        return None
    _suffix, format_ = named
    return format_
