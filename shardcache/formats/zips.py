"""Zips: members are grouped into samples by their names, as in tars.

Unlike in a tar, the members of a sample need not be adjacent. A member that is stored without
compression is a range of the file. A zip with compressed members becomes a tar in the cache, so
that the members are inflated only once.
"""

import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from tarfile import PAX_FORMAT, TarInfo
from typing import BinaryIO

from shardcache.errors import CorruptShardError
from shardcache.formats.format import Format, IndexOptions
from shardcache.formats.streams import stream_of
from shardcache.formats.zip_directory import (
    DEFLATED,
    ZipMember,
    ZipMembers,
    is_stored,
    members_of,
    numbers_sorted_by,
)
from shardcache.tarindex.grouping import group, index_tar, split_name
from shardcache.tarindex.members import BLOCK_BYTES, padded, parse_header
from shardcache.tarindex.tables import Samples

_PIECE_BYTES = 256 * 1024
_RAW_DEFLATE = -15  # for zlib: the largest window, and no header


def index(path: Path, url: str) -> Samples:
    """Return the samples of the zip at `path`, none of whose members is compressed. Blocks.

    Raises OSError; what `members_of` raises; CorruptShardError for a member whose content does not
    match its checksum.
    """
    with open(path, "rb", buffering=0) as file:
        members = members_of(file, url)
        for number in numbers_sorted_by(members.starts):
            _check_content(file, members[number], url)
    grouped = _by_sample(members)
    fault = None  # no member has one, since each has just been checked
    return group((member.name, member.start, member.end, fault) for member in grouped)


def as_tar(path: Path, url: str) -> Iterator[bytes]:
    """Yield the zip at `path` as a tar, in pieces. Blocks.

    Raises OSError; what `members_of` raises; CorruptShardError for a member with another size or
    checksum than the zip says.
    """
    with open(path, "rb", buffering=0) as file:
        for member in _by_sample(members_of(file, url)):
            info = TarInfo(member.name.decode("utf-8", "surrogateescape"))
            info.size = member.size_bytes
            yield info.tobuf(PAX_FORMAT, "utf-8", "surrogateescape")
            yield from _content(file, member, url)
            yield bytes(padded(member.size_bytes) - member.size_bytes)
    yield bytes(2 * BLOCK_BYTES)


class ZipFormat(Format):
    """Zips."""

    name = "zip"
    suffixes = {".zip": None}  # noqa: RUF012  # a Mapping
    is_common_outside_datasets = True
    magic = b"PK\3\4"
    repacks = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        if _is_tar(path):
            return index_tar(path, url, require_adjacent=False)
        return index(path, url)

    def stored_copy(self, path: Path, url: str) -> BinaryIO | None:
        """As `Format.stored_copy`."""
        with open(path, "rb", buffering=0) as file:
            if is_stored(file, url):
                return None
        return stream_of(as_tar(path, url))


ZIP = ZipFormat()


def _is_tar(path: Path) -> bool:
    """Return True for a cached file that `as_tar` has made of a zip. Blocks. Raises OSError."""
    with open(path, "rb") as file:
        block = file.read(BLOCK_BYTES)
    try:
        parse_header(block)
    except (ValueError, struct.error):
        return False
    return True


def _by_sample(members: ZipMembers) -> Iterator[ZipMember]:
    """Yield the members in an order in which the members of each sample are adjacent.

    The samples have the order of their first members.
    """
    for number in numbers_sorted_by(_sample_numbers(members)):
        yield members[number]


def _sample_numbers(members: ZipMembers) -> "array[int]":
    """Return the number of each member's sample, u32."""
    numbers = array("I")
    number_of_key: dict[bytes, int] = {}
    for member in range(len(members)):
        key, _ = split_name(members[member].name)
        numbers.append(number_of_key.setdefault(key, len(number_of_key)))
    return numbers


def _check_content(file: BinaryIO, member: ZipMember, url: str) -> None:
    """Raise CorruptShardError for a member with another size or checksum than the zip says."""
    for _ in _content(file, member, url):
        pass


def _content(file: BinaryIO, member: ZipMember, url: str) -> Iterator[bytes]:
    """Yield the content of a member in pieces.

    Raises CorruptShardError, possibly after the last piece, if size or checksum do not match.
    """
    pieces = _stored(file, member)
    if member.method == DEFLATED:
        pieces = _inflated(pieces, member, url)
    crc = 0
    left_bytes = member.size_bytes
    for piece in pieces:
        left_bytes -= len(piece)
        # The size is checked before each piece is written, as a zip bomb may inflate to more than
        # any disk holds.
        if left_bytes < 0:
            raise _damaged(member, f"has more than {member.size_bytes} bytes", url)
        crc = zlib.crc32(piece, crc)
        yield piece
    if left_bytes:
        raise _damaged(member, f"has {left_bytes} bytes fewer than the zip says", url)
    if crc != member.crc:
        raise _damaged(member, "does not have its checksum", url)


def _stored(file: BinaryIO, member: ZipMember) -> Iterator[bytes]:
    """Yield the bytes of a member in pieces, as they are stored."""
    for at in range(member.start, member.end, _PIECE_BYTES):
        yield os.pread(file.fileno(), min(_PIECE_BYTES, member.end - at), at)


def _inflated(pieces: Iterable[bytes], member: ZipMember, url: str) -> Iterator[bytes]:
    """Yield the content of a compressed member, in pieces of at most `_PIECE_BYTES`."""
    stream = zlib.decompressobj(_RAW_DEFLATE)
    try:
        for piece in pieces:
            unread = piece
            while unread and not stream.eof:
                yield stream.decompress(unread, _PIECE_BYTES)
                unread = stream.unconsumed_tail
        yield stream.flush()
    except zlib.error as exn:
        raise _damaged(member, f"cannot be inflated ({exn})", url) from exn
    if not stream.eof:
        raise _damaged(member, "ends early", url)


def _damaged(member: ZipMember, what: str, url: str) -> CorruptShardError:
    return CorruptShardError(
        f"the zip is damaged: its member {member.shown_name!r} {what}", url=url
    )
