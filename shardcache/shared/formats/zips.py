"""Zips: members are grouped into samples by their names, as in tars.

Unlike in a tar, the members of a sample need not be adjacent. A member that is stored without
compression is a range of the file. If any member of a zip is compressed, the cache stores a tar of
the zip's members instead of the zip, so that they are inflated only once.
"""

import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from tarfile import PAX_FORMAT, TarInfo
from typing import BinaryIO

from shardcache.shared.exceptions import CorruptShardError
from shardcache.shared.formats.format import Format, IndexOptions
from shardcache.shared.formats.streams import stream_of
from shardcache.shared.formats.zip_directory import (
    DEFLATED,
    ZipMember,
    ZipMembers,
    is_all_stored,
    members_of,
    numbers_sorted_by,
)
from shardcache.shared.tarindex.grouping import group, index_tar, split_name
from shardcache.shared.tarindex.members import BLOCK_BYTES, padded, parse_header
from shardcache.shared.tarindex.tables import Samples

_PIECE_BYTES = 256 * 1024
_RAW_DEFLATE = -15  # for zlib: the largest window, and no header


class ZipFormat(Format):
    """Zips."""

    name = "zip"
    suffixes = {".zip": None}  # noqa: RUF012  # a Mapping
    is_common_outside_datasets = True
    magic = b"PK\3\4"
    may_repack = True

    def index(self, path: Path, url: str, options: IndexOptions) -> Samples:
        """As `Format.index`."""
        if _is_tar(path):  # the file from `stored_copy`
            return index_tar(path, url, require_adjacent=False)
        return _index(path, url)

    def stored_copy(self, path: Path, url: str) -> BinaryIO | None:
        """As `Format.stored_copy`."""
        with open(path, "rb", buffering=0) as file:
            if is_all_stored(file, url):
                return None
        return stream_of(as_tar(path, url))


ZIP = ZipFormat()


def _index(path: Path, url: str) -> Samples:
    """Return the samples of the zip at `path`, none of whose members is compressed. Blocks.

    Raises OSError; what `members_of` raises; CorruptShardError for a member whose content does not
    match its checksum.
    """
    with open(path, "rb", buffering=0) as file:
        members = members_of(file, url)
        for number in numbers_sorted_by(members.starts):
            _check_content(file, members[number], url)
    no_fault = None  # each member has just been checked
    return group(
        (member.name, member.start, member.end, no_fault) for member in _by_sample(members)
    )


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
    sample_numbers = _sample_numbers(members)
    for member_number in numbers_sorted_by(sample_numbers):
        yield members[member_number]


def _sample_numbers(members: ZipMembers) -> "array[int]":
    """Return the number of each member's sample, u32.

    Samples are numbered in the order of their first members.
    """
    sample_numbers = array("I")
    number_by_key: dict[bytes, int] = {}
    for member_number in range(len(members)):
        key, _ = split_name(members[member_number].name)
        sample_number = number_by_key.setdefault(key, len(number_by_key))
        sample_numbers.append(sample_number)
    return sample_numbers


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
    missing_bytes = member.size_bytes
    for piece in pieces:
        missing_bytes -= len(piece)
        # The size is checked before each piece is yielded, since a zip bomb may inflate to more
        # than any disk holds.
        if missing_bytes < 0:
            raise _damaged(member, f"has more than {member.size_bytes} bytes", url)
        crc = zlib.crc32(piece, crc)
        yield piece
    if missing_bytes:
        raise _damaged(member, f"has {missing_bytes} bytes fewer than the zip says", url)
    if crc != member.crc:
        raise _damaged(member, "does not have its checksum", url)


def _stored(file: BinaryIO, member: ZipMember) -> Iterator[bytes]:
    """Yield the bytes of a member in pieces, as they are stored in the zip."""
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


def _damaged(member: ZipMember, problem: str, url: str) -> CorruptShardError:
    return CorruptShardError(
        f"the zip is damaged: its member {member.shown_name!r} {problem}", url=url
    )
