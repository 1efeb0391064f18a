"""Samples and their bytes in a tar. No function here reads or writes files.

A sample has a key and some members. Each member is a file in the tar whose name is the sample's
key, a dot, and the member's extension. A reader has only these names to go by, so `checked` rejects
a sample whose names readers would split into another key or other extensions.
"""

import io
import json
import operator
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.shared.exceptions import SampleError
from shardcache.shared.tarindex.contents import Row
from shardcache.shared.tarindex.grouping import is_of_macos, split_name
from shardcache.shared.tarindex.members import BLOCK_BYTES, ZERO_BLOCK, padded

END = 2 * ZERO_BLOCK
"""The end of an archive, two blocks of zeros."""

Position = Any
"""The place of a sample in an input, as a JSON value.

Each kind of input has its own: a number, or a tuple, which arrives in another process as a list.
"""

_METADATA_KEY = re.compile(r"__[^/]*__($|/)")  # readers skip such keys
_SHOWN_CHARS = 200  # errors show at most this much of a key or extension
# The extensions whose values webdataset's writers write as decimal integers.
_INTEGER_EXTENSIONS = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})
# Maximum length of a name in a plain header, and the size from which a member does not fit one.
_NAME_BYTES = 100
_MIN_LARGE_BYTES = 8 * 1024**3


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample; or packed lines, a single member in which each line is a sample.

    Attributes:
        key: the sample's key, without a dot in its last component.
        members: extension and content of each member, in the order in which they are written.
        count: number of samples that readers will find here. It may differ from 1 only for packed
            lines (`tarindex.packed_lines`).
    """

    key: str
    members: tuple[tuple[str, bytes], ...]
    count: int = 1

    @property
    def size_bytes(self) -> int:
        """Space that the sample takes in a tar, headers and padding included."""
        return tar_bytes(self.key, ((extension, len(data)) for extension, data in self.members))

    def tar(self) -> Iterator[bytes]:
        """Yield the bytes of the sample's members in a tar, in pieces.

        The caller has to write `END` after the last sample.
        """
        for extension, data in self.members:
            yield header(utf8(f"{self.key}.{extension}"), len(data))
            yield data
            surplus_bytes = len(data) % BLOCK_BYTES
            if surplus_bytes:
                yield ZERO_BLOCK[surplus_bytes:]


def table_part(number: int, version: str | None, rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield the part of the table of samples that describes one shard, in pieces.

    The table is itself a tar of samples, one for each row. The caller has to write `END` after the
    last part.

    Args:
        number: number of the shard in the index.
        version: version of the shard; None for a local shard.
        rows: the rows of the shard, as from `contents.rows_of`.
    """
    for row in rows:
        content = json.dumps(
            {"shard": number, "version": version, **row},
            separators=(",", ":"),
        )
        key = f"{number:08d}-{row['first']:08d}"
        yield from Sample(key, (("json", content.encode()),)).tar()


def sample_of(fields: Mapping[str, Any]) -> Sample:
    """Return the sample of a mapping as webdataset's writers take it.

    The mapping has the sample's key under `__key__`, and each member's value under its extension.
    `bytes` are written as they are, and `str` in UTF-8. Other values are written by the last part
    of their extension: `json` as JSON, `npy` as a NumPy array, and `cls`, `id`, `index` and their
    like as a decimal number. Names other than `__key__` that begin with `__`, such as `__url__`,
    are left out.

    Raises SampleError for a sample without a key or members, a value that its extension cannot
    encode, and a name that readers would split differently.
    """
    key = fields.get("__key__")
    if not isinstance(key, str):
        raise SampleError(
            "a sample has no __key__",
            remedy='give each sample a key of its own: {"__key__": "000017"}',
        )
    members = []
    for extension, value in fields.items():
        if not extension.startswith("__"):
            members.append((extension, encoded(key, extension, value)))
    return checked(Sample(key, tuple(members)))


def checked(sample: Sample) -> Sample:
    """Return the sample if readers will find the same key and extensions in its members' names.

    Raises SampleError otherwise.
    """
    key = sample.key
    if not sample.members:
        raise SampleError(f"the sample {shown(key)} has no members, so readers would not see it")
    if _METADATA_KEY.match(key):
        raise SampleError(
            f"readers skip keys such as {shown(key)}, which mark metadata",
            remedy="rename the sample",
        )
    seen_extensions = set()
    for extension, _ in sample.members:
        _check_name(key, extension)
        # Readers compare extensions in lower case.
        if extension.lower() in seen_extensions:
            raise SampleError(
                f"the sample {shown(key)} has two members with the extension {shown(extension)}",
            )
        seen_extensions.add(extension.lower())
    return sample


def _check_name(key: str, extension: str) -> None:
    """Raise SampleError unless readers will find key and extension in a member's name."""
    name = f"{key}.{extension}"
    try:
        encoded_name = utf8(name)
    except UnicodeEncodeError as exn:
        raise SampleError(
            f"the key {shown(key)} with the extension {shown(extension)} cannot be written in "
            f"UTF-8 ({exn.reason})",
            remedy="use keys and extensions without half a surrogate pair",
        ) from exn
    if "\0" in name:
        raise SampleError(
            f"readers would take NUL for the end of the name of key {shown(key)}, extension "
            f"{shown(extension)}",
            remedy="use keys and extensions without NUL",
        )
    if is_of_macos(encoded_name):
        raise SampleError(
            f"readers skip members such as {shown(name)}, which macOS adds",
            remedy="rename the sample",
        )
    if not extension or split_name(encoded_name) != (utf8(key), utf8(extension)):
        raise SampleError(
            f"readers would not find key {shown(key)} and extension {shown(extension)} in a "
            "member's name",
            remedy="use keys without a dot in their last component, and extensions without a slash",
        )


def encoded(key: str, extension: str, value: Any) -> bytes:
    """Return a member's content, encoded as `sample_of` describes.

    Raises SampleError for a value that the extension cannot encode.

    Args:
        key: key of the sample, for the error.
        extension: extension of the member.
        value: the value.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    _, _, suffix = extension.lower().rpartition(".")
    reason = ""
    try:
        if suffix == "json":
            return as_json(value, default=None)
        if isinstance(value, str):
            return _text(value)
        if suffix in _INTEGER_EXTENSIONS:
            return b"%d" % operator.index(value)
        if suffix == "npy":
            return as_npy(value)
    except (TypeError, ValueError) as exn:
        reason = f" ({exn})"
    raise SampleError(
        f"the sample {shown(key)} has a value of type {type(value).__name__} for "
        f"{shown(extension)}{reason}",
        remedy="pass bytes; or text, a number for `cls`, an array for `npy`, anything else as "
        "`json`",
    )


def as_json(value: object, default: Callable[[Any], object] | None = str) -> bytes:
    """Return a value as compact JSON in UTF-8. Raises TypeError, ValueError.

    Args:
        value: the value.
        default: converts a value of a type that JSON lacks, such as a date; `str` makes it text.
            None makes such a value a TypeError.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=default)
    return _text(text)


def as_npy(value: object, dtype: str | None = None) -> bytes:
    """Return an array as the bytes of an `.npy` file. Raises TypeError, ValueError.

    Args:
        value: the array, or nested lists of numbers.
        dtype: type of the array; None to let numpy choose one by the values.
    """
    import numpy  # here, since only users of arrays need it

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.asarray(value, dtype), allow_pickle=False)
    return buffer.getvalue()


def utf8(text: str) -> bytes:
    """Return a name in UTF-8.

    A file's name may have bytes that are not UTF-8. Python decodes them to surrogate escapes, which
    become the same bytes again.
    """
    return text.encode("utf-8", "surrogateescape")


def _text(value: str) -> bytes:
    """Return the content of a text member in UTF-8. Raises UnicodeEncodeError, a ValueError.

    Unlike in names (`utf8`), surrogate escapes are errors: readers would not get the text back.
    """
    return value.encode()


def shown(text: str) -> str:
    """Return a text in quotes for an error, cut to a maximum length."""
    return repr(text[:_SHOWN_CHARS])


def tar_bytes(key: str, sizes: Iterable[tuple[str, int]]) -> int:
    """Return the space that a sample takes in a tar, given extension and size of each member."""
    total_bytes = 0
    for extension, size_bytes in sizes:
        name = utf8(f"{key}.{extension}")
        total_bytes += member_bytes(len(name), size_bytes)
    return total_bytes


def member_bytes(name_bytes: int, content_bytes: int) -> int:
    """Return the space that a member takes in a tar, given the lengths of name and content."""
    long_name_bytes = 0
    if name_bytes > _NAME_BYTES:
        # GNU's format stores the name, with a NUL at its end, in an extra member before this one.
        long_name_bytes = BLOCK_BYTES + padded(name_bytes + 1)
    return long_name_bytes + BLOCK_BYTES + padded(content_bytes)


def header(name: bytes, size_bytes: int) -> bytes:
    """Return the header of a regular file in GNU format, ten times as fast as tarfile does."""
    # Long names and large sizes, which are rare, need GNU's extensions.
    if len(name) > _NAME_BYTES or size_bytes >= _MIN_LARGE_BYTES:
        return _tarfile_header(name, size_bytes)
    name_field = name.ljust(_NAME_BYTES, b"\0")
    size_field = b"%011o\0" % size_bytes
    checksum = _FIXED_SUM + sum(name) + sum(size_field)
    return b"".join(
        (
            name_field,
            _BEFORE_SIZE,
            size_field,
            _BEFORE_CHECKSUM,
            b"%06o\0 " % checksum,
            _AFTER_CHECKSUM,
        )
    )


def _tarfile_header(name: bytes, size_bytes: int) -> bytes:
    """Return tarfile's header with its default values: mode 0644, owner root, time 0."""
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    info.size = size_bytes
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


# The bytes that are the same in every header. Only three fields differ from header to header: the
# name (bytes 0 to 100), the size (124 to 136) and the checksum (148 to 156).
_EMPTY_HEADER = _tarfile_header(b"", 0)
_BEFORE_SIZE = _EMPTY_HEADER[_NAME_BYTES:124]
_BEFORE_CHECKSUM = _EMPTY_HEADER[136:148]
_AFTER_CHECKSUM = _EMPTY_HEADER[156:]
# The checksum is the sum of all bytes, where its own field counts as eight spaces.
_BLANKS_SUM = 8 * ord(" ")
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_BEFORE_CHECKSUM) + _BLANKS_SUM + sum(_AFTER_CHECKSUM)
