"""The table of formats, and the format and compression that a file's name states.

A suffix is the end of a shard's name that states the format, and the compression if there is one:
".tar", ".tar.zst". A plain file is one that is not compressed as a whole. The name of a shard that
is one of several may end in a number after the suffix: "name.tfrecord-00000-of-00010".
"""

import re
from collections.abc import Mapping
from functools import cache

from shardcache.shared.formats.arrow.parquet_file import PARQUET
from shardcache.shared.formats.chunks.litdata_chunks import LITDATA
from shardcache.shared.formats.chunks.mds import MDS
from shardcache.shared.formats.format import Format
from shardcache.shared.formats.jsonl import JSON_LINES
from shardcache.shared.formats.records.array_record import ARRAY_RECORD
from shardcache.shared.formats.records.tfrecord import TFRECORD
from shardcache.shared.formats.tar import TAR
from shardcache.shared.formats.zips import ZIP

FORMATS: tuple[Format, ...] = (
    TAR,
    MDS,
    LITDATA,
    ZIP,
    JSON_LINES,
    TFRECORD,
    ARRAY_RECORD,
    PARQUET,
)
"""All formats."""

_BY_NAME: Mapping[str, Format] = {format_.name: format_ for format_ in FORMATS}
_BY_SUFFIX: Mapping[str, Format] = {
    suffix: format_ for format_ in FORMATS for suffix in format_.suffixes
}

_TRAILING_NUMBER = re.compile(r"-[0-9]+-of-[0-9]+\Z")

SUFFIXES = tuple(sorted(_BY_SUFFIX, key=len, reverse=True))
"""Suffixes of all formats, in lower case, the longest first: ".zstd.bin" before ".bin"."""


def suffix_and_format(name: str) -> tuple[str, Format] | None:
    """Return the suffix in a shard's name, and the format; None if the name is not a shard's.

    Args:
        name: name of a file, in upper or lower case, with or without its folders.
    """
    lowered = name.lower()
    # 1. If the name ends in a number, the suffix is before it.
    without_number = _TRAILING_NUMBER.sub("", lowered)
    if without_number != lowered:
        named = suffix_and_format(without_number)
        if named is not None and _may_end_in_number(*named):
            return named

    # 2. Otherwise, the suffix is at the end. One call of `endswith` rules out most names.
    if not lowered.endswith(SUFFIXES):
        return None
    file_name = lowered.rpartition("/")[2]
    for suffix in SUFFIXES:
        format_ = _BY_SUFFIX[suffix]
        if lowered.endswith(suffix) and format_.may_have_name(file_name):
            return suffix, format_
    return None


def _may_end_in_number(suffix: str, format_: Format) -> bool:
    """Return True if a number may follow a suffix: for plain files of some formats."""
    compression = format_.suffixes[suffix]
    return format_.may_end_in_number and compression is None


def format_of(name: str) -> Format:
    """Return the format of a shard with this name; tar if the name states no format."""
    named = suffix_and_format(name)
    if named is None:
        return TAR
    _, format_ = named
    return format_


def compression_of(name: str) -> str | None:
    """Return the compression that a shard's name states; None for a plain file, or no shard."""
    named = suffix_and_format(name)
    if named is None:
        return None
    suffix, format_ = named
    return format_.suffixes[suffix]


def plain_suffixes() -> tuple[str, ...]:
    """Return the suffixes of plain shards of all formats."""
    return tuple(
        suffix
        for format_ in FORMATS
        for suffix, compression in format_.suffixes.items()
        if compression is None
    )


@cache
def plain_suffix(format_: Format) -> str:
    """Return the suffix of a format's plain files; the first if there are several."""
    return next(suffix for suffix, compression in format_.suffixes.items() if not compression)


def format_named(name: str) -> Format | None:
    """Return the format by its name in a sidecar; None if this release does not know the name."""
    return _BY_NAME.get(name)
