"""Members of a tar: USTAR, old GNU and PAX, interpreted like the standard library's tarfile.

A member is a file in the tar. `grouping` iterates a `Tar` to index a shard. Only the headers are
read, up to the end of the archive, and any damage is an error. Names stay bytes throughout.

A tar consists of blocks of 512 bytes. A member is a header block, followed by its content. An
extended header is a header block whose content describes the member after it, such as its long
name; a global header describes all members after it. The content of a PAX header consists of
records, each with a keyword and a value.

Formats: POSIX.1-2008, pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar manual,
"Basic Tar Format".
"""

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from posixpath import normpath
from zlib import adler32

from shardcache.shared.exceptions import (
    CorruptShardError,
    NotATarError,
    ShardError,
    TrailingDataError,
    TruncatedShardError,
)
from shardcache.shared.tarindex.tables import Fault

BLOCK_BYTES = 512
ZERO_BLOCK = bytes(BLOCK_BYTES)

HARD_LINK = b"1"
DIRECTORY = b"5"
GNU_SPARSE = b"S"
# GNU's kinds of headers for long names, with the PAX record that means the same.
GNU_LONG = {b"L": b"path", b"K": b"linkpath"}
PAX_GLOBAL = b"g"
# These headers describe the members that follow.
EXTENDED_HEADERS = frozenset({b"x", b"X", PAX_GLOBAL, *GNU_LONG})
REGULAR = frozenset({b"0", b"\0", b"7", GNU_SPARSE})
# Links, devices, directories and fifos: no content follows their header, whatever its size field
# says.
DATALESS = frozenset({HARD_LINK, b"2", b"3", b"4", DIRECTORY, b"6"})

# These kinds of headers use the field for the name's prefix for other data.
_WITHOUT_PREFIX = frozenset({GNU_SPARSE, *GNU_LONG})
# The fields are name, size, checksum, type and prefix.
_FIELDS = struct.Struct("100s 24x 12s 12x 8s 1s 188x 155s 12x")
# Byte ranges in a header block.
_BEFORE_CHECKSUM = slice(0, 148)
_AFTER_CHECKSUM = slice(156, None)
_LINK_NAME = slice(157, 257)
_PAX_RECORD = re.compile(rb"([0-9]{1,9}) ([^=\n]+)=")
# GNU's flag `isextended` says that another block of a sparse map follows. These are its offsets in
# a header block, and in a block of the map.
_IS_EXTENDED_IN_HEADER = 482
_IS_EXTENDED_IN_MAP = 504

# Bytes to read from a header on: several small members together with their headers, but little more
# than one header after a large member, as another large one may follow.
_WINDOW_BYTES = 32 * 1024
_WINDOW_AFTER_LARGE_BYTES = 2 * 1024
# Zeros after the end of the archive are checked in pieces of this size.
_TAIL_BYTES = 1024 * 1024

# Limit for a long name or a set of PAX records; libarchive's limit for names is 1 MiB.
_EXTENDED_LIMIT_BYTES = 16 * 1024 * 1024

# A name in a global header applies to every member that has no name of its own. Without a limit,
# the names of a tar of a megabyte could need gigabytes of memory.
_GLOBAL_LIMIT_BYTES = 4096

# Messages quote at most this much of a name, a size, and the beginning of a file that is not a tar.
_SHOWN_BYTES = 200
_SHOWN_DIGITS = 40
_SHOWN_MAGIC_BYTES = 16
_MAX_SIZE_DIGITS = 19  # digits of a number below 2**63
_ADLER_MODULUS = 65521

# The PAX records that are used. Other records about sparse files only mark their member as sparse.
_SPARSE = b"GNU.sparse."
_SPARSE_NAME = _SPARSE + b"name"
_USED_KEYWORDS = frozenset({b"path", b"linkpath", b"size", _SPARSE_NAME})

# First bytes of compressed files, with the compression and the suffix of a tar that has it.
_MAGIC = {
    b"\x1f\x8b": ("gzip", ".tar.gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", ".tar.zst"),
    b"BZh": ("bzip2", ".tar.bz2"),
    b"\xfd7zXZ\x00": ("xz", ".tar.xz"),
    b"\x04\x22\x4d\x18": ("lz4", ".tar.lz4"),
}


Header = tuple[bytes, int, bytes]
"""Name, size of the content in bytes, and kind, as a header block gives them.

No content follows a header whose kind is in DATALESS.
"""

Records = dict[bytes, bytes]
"""PAX records, by keyword."""

Member = tuple[bytes, int, int, Fault | None]
"""A file in a tar: name, start, end, and fault.

The name is as stored. Start and end are the offsets in the tar of the content's first byte, and of
the byte after its last. The fault is the reason why these bytes are not the file's content, or
None. A hard link has the start and end of the file that it is linked to.
"""

Content = tuple[int, int, Fault | None]
"""Start, end and fault of a member."""

Read = Callable[[int, int, int], bytes]
"""`read(offset, min_bytes, max_bytes)` returns the bytes of the tar from an offset on.

It returns between `min_bytes` and `max_bytes` bytes, and fewer only at the end of the tar.
"""


def parse_header(block: bytes) -> Header:
    """Parse a header block of 512 bytes, after verifying its checksum.

    Raises ValueError for an invalid field.
    """
    name, size, checksum, kind, prefix = _FIELDS.unpack(block)
    # The low half of Adler-32 is the sum of all bytes plus one, modulo 65521; adler32() is about 20
    # times as fast as sum().
    adler = adler32(block) & 0xFFFF
    # The checksum was computed with blanks in its own field: the field's bytes take their place.
    blanks = len(checksum) * ord(" ")
    expected_sum = parse_number(checksum) - blanks + sum(checksum)
    if adler != (expected_sum + 1) % _ADLER_MODULUS:
        # Some tars sum signed characters: each byte from 0x80 on then counts 256 less.
        summed = block[_BEFORE_CHECKSUM] + block[_AFTER_CHECKSUM]
        negative_bytes = sum(byte >= 0x80 for byte in summed)
        expected_sum += 256 * negative_bytes
        if adler != (expected_sum + 1) % _ADLER_MODULUS:
            raise ValueError("its checksum does not match")
    size_bytes = parse_number(size)
    if size_bytes < 0:
        raise ValueError(f"it gives a size of {size_bytes} bytes")
    name = name.partition(b"\0")[0]
    if kind == b"\0" and name.endswith(b"/"):
        kind = DIRECTORY  # old tar programs had no kind for directories
    if prefix[0] and kind not in _WITHOUT_PREFIX:
        name = prefix.partition(b"\0")[0] + b"/" + name
    return name, size_bytes, kind


def parse_number(field: bytes) -> int:
    """Parse octal digits up to the first NUL, or a big-endian binary number of GNU tar.

    The first byte of a binary number is 0x80 if the number is positive, and larger if it is signed.
    """
    if field[0] < 0x80:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return int.from_bytes(field, "big", signed=True)


def parse_pax(payload: bytes) -> Records:
    """Parse records of the form `length key=value\\n`, where `length` counts the whole record."""
    records: Records = {}
    at = 0
    while at < len(payload):
        match = _PAX_RECORD.match(payload, at)
        if match is None:
            raise ValueError(f"its record at byte {at} has no length and keyword")
        end = at + int(match[1])
        value_start = match.end()
        if not value_start < end <= len(payload) or payload[end - 1] != ord("\n"):
            raise ValueError(f"its record at byte {at} has a wrong length")
        records[match[2]] = payload[value_start : end - 1]
        at = end
    if b"path" in records:
        records[b"path"] = records[b"path"].rstrip(b"/")  # as tarfile does
    return records


def padded(size_bytes: int) -> int:
    """Round a size up to whole blocks."""
    return (size_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


@dataclass(slots=True, eq=False, repr=False)
class Tar:
    """A tar of known size, some of whose bytes may still have to arrive.

    Iterating yields the files of the tar in order. As in tarfile, the first block of zeros ends the
    archive. Unlike in tarfile, nothing else ends the archive, and the rest of the file must be
    zeros. A member is yielded as soon as its header has arrived: up to the end of the archive,
    `_source` never has to return more than the next header.
    """

    _source: Read  # reads bytes of the tar; the exceptions that it raises pass through
    _size_bytes: int  # size of the whole tar
    _url: str  # the shard's url, for error messages
    _: KW_ONLY
    # Reject a file that ends between two members, without a block of zeros.
    require_end: bool = True
    # Do not read beyond the first block of zeros.
    ignore_trailing_data: bool = False
    # The bytes read last, and the offset in the tar at which they begin.
    _window: bytes = field(default=b"", init=False)
    _window_start: int = field(default=0, init=False)
    # The contents of the files so far, by path. None until the first hard link needs them.
    _contents: dict[bytes, Content] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Member]:
        """Yield each regular file and hard link; a link has the content of the file before it.

        Raises:
            NotATarError: the file does not begin with a tar header.
            TruncatedShardError: it ends early.
            TrailingDataError: data follows its end.
            CorruptShardError: a header is damaged.
        """
        global_records: Records = {}  # records that apply to all members that follow
        own_records: Records = {}  # records from the extended headers of the next member
        has_extended_header = False  # True if the next member has such a header
        at = 0
        begin = 0  # offset of the next member's first header, extended headers included
        while True:
            header = self._header(at)
            if header is None:
                break
            _, _, kind = header
            if kind in EXTENDED_HEADERS:
                records, next_header = self._extended_header(header, at)
                if kind == PAX_GLOBAL:
                    self._check_global(records, at)
                    global_records |= records
                else:
                    own_records = records | own_records  # the earlier header takes precedence
                    has_extended_header = True
                at = next_header
                continue

            records = own_records
            if global_records:
                records = global_records | own_records
            member, next_header = self._member(header, at, records)
            if kind == HARD_LINK:
                member = self._hard_link(header, at, begin, records)
            at = next_header
            if member is not None:
                if self._contents is not None:
                    name, start, end, fault = member
                    self._contents[_normalized(name)] = (start, end, fault)
                yield member
            begin = at
            if has_extended_header:
                own_records = {}
                has_extended_header = False

        if has_extended_header:
            raise TruncatedShardError(
                f"the tar ends at byte {at}, between a member's extended header and the member",
                url=self._url,
            )

    def _header(self, at: int) -> Header | None:
        """Read the header at byte `at`; return None if the tar ends there.

        Raises ShardError if the tar must not end there.
        """
        block = self._read(at, BLOCK_BYTES)
        if len(block) < BLOCK_BYTES:
            self._check_end(at, block)
            return None
        if block == ZERO_BLOCK:
            self._check_tail(at)
            return None
        try:
            return parse_header(block)
        except ValueError as exn:
            if at == 0:
                raise self._not_a_tar(block) from exn
            raise self._corrupt(at, f"the tar header there is damaged ({exn})") from exn

    def _check_end(self, at: int, partial_block: bytes) -> None:
        """Raise ShardError if the tar must not end at byte `at`.

        Args:
            at: offset at which a header is expected.
            partial_block: the bytes from there to the end of the file, less than a block.
        """
        if self._size_bytes == 0:
            raise TruncatedShardError("the file is empty", url=self._url)
        if at == 0:
            raise self._not_a_tar(partial_block)
        if partial_block:
            raise self._truncated(f"inside the tar header that begins at byte {at}")
        if self.require_end:
            raise self._truncated(
                "after a complete member but without an end-of-archive block, so members may be "
                "missing",
                remedy="write and upload the shard again; if its writer never writes "
                "end-of-archive blocks, set `require_end = false` in its [[origin]] table",
            )

    def _check_tail(self, end: int) -> None:
        """Raise TrailingDataError unless only zeros follow the block of zeros at byte `end`."""
        if self.ignore_trailing_data:
            return
        at = end + BLOCK_BYTES
        # At least 1 byte is requested each time, so a piece is empty only at the end of the tar.
        piece = self._source(at, 1, _TAIL_BYTES)
        while piece:
            data = piece.lstrip(b"\0")
            if data:
                data_start = at + len(piece) - len(data)
                raise TrailingDataError(
                    f"a block of zeros at byte {end} ends the tar, but data follows at byte "
                    f"{data_start}, so samples may be missing",
                    url=self._url,
                )
            at += len(piece)
            piece = self._source(at, 1, _TAIL_BYTES)

    def _extended_header(self, header: Header, at: int) -> tuple[Records, int]:
        """Return the records of the extended header at `at`, and the offset of the next header."""
        _, size_bytes, kind = header
        start = at + BLOCK_BYTES
        end = start + padded(size_bytes)
        if end > self._size_bytes:
            raise self._truncated(f"inside the extended header that begins at byte {at}")
        if size_bytes > _EXTENDED_LIMIT_BYTES:
            raise self._corrupt(at, f"an extended header claims {size_bytes} bytes")
        payload = self._read(start, end - start)
        if kind in GNU_LONG:
            # As in tarfile, the name ends at the first NUL, regardless of the header's size field.
            return {GNU_LONG[kind]: payload.partition(b"\0")[0]}, end
        try:
            return _without_unused(parse_pax(payload[:size_bytes])), end
        except ValueError as exn:
            raise self._corrupt(at, f"the PAX header there is damaged ({exn})") from exn

    def _check_global(self, records: Records, at: int) -> None:
        """Raise CorruptShardError if a record of the global header at `at` is too large."""
        for keyword, value in records.items():
            if len(value) > _GLOBAL_LIMIT_BYTES:
                raise self._corrupt(
                    at,
                    f"a global header gives all members one {keyword!r} of {len(value)} bytes",
                )

    def _member(self, header: Header, at: int, records: Records) -> tuple[Member | None, int]:
        """Return the member of a header, and the offset of the next header.

        The member is None unless it is a regular file.

        Args:
            header: the header at byte `at`.
            at: offset of that header.
            records: records of extended headers that apply to the member.
        """
        name, size_bytes, kind = header
        start = at + BLOCK_BYTES
        is_sparse = kind == GNU_SPARSE
        if kind in DATALESS:
            return None, start
        if is_sparse:
            start = self._end_of_sparse_map(at)
        if records:
            name = records.get(_SPARSE_NAME, records.get(b"path", name))
            if b"size" in records:
                size_bytes = self._pax_size(records[b"size"], at)
            is_sparse = is_sparse or any(keyword.startswith(_SPARSE) for keyword in records)
        end = start + size_bytes
        next_header = start + padded(size_bytes)
        if next_header > self._size_bytes:
            shown = name[:_SHOWN_BYTES].decode(errors="replace")
            raise self._truncated(
                f"inside the member {shown!r}, which spans bytes {start} to {end}",
            )
        if kind not in REGULAR:
            return None, next_header
        fault = Fault.SPARSE if is_sparse else None
        return (name, start, end, fault), next_header

    def _hard_link(self, header: Header, at: int, begin: int, records: Records) -> Member:
        """Return the member for a hard link, with the content of the file that the link names.

        If several files before the link have that path, the last one counts, as in tarfile.

        Args:
            header: the link's header.
            at: offset of that header.
            begin: offset of the first header that belongs to the link.
            records: records of extended headers that apply to the link.
        """
        if self._contents is None:  # this is the first hard link
            self._contents = self._contents_before(begin)
        header_name, _, _ = header
        name = records.get(b"path", header_name)
        target = records.get(b"linkpath")
        if target is None:
            target = self._read(at, BLOCK_BYTES)[_LINK_NAME].partition(b"\0")[0]
        content = self._contents.get(_normalized(target), (0, 0, Fault.LINK))
        return (name, *content)

    def _contents_before(self, stop: int) -> dict[bytes, Content]:
        """Return the contents of all files whose headers are before `stop`, by path.

        `stop` is where the headers of the first hard link begin. The tar is walked a second time up
        to there, so that no paths are remembered for the many tars without hard links.
        """
        if not stop:
            return {}

        def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
            remaining_bytes = stop - at
            if remaining_bytes <= 0:
                return b""
            return self._source(
                at, min(min_bytes, remaining_bytes), min(max_bytes, remaining_bytes)
            )

        before = Tar(read, self._size_bytes, self._url, require_end=False)
        return {_normalized(name): (start, end, fault) for name, start, end, fault in before}

    def _pax_size(self, digits: bytes, at: int) -> int:
        """Return the size in bytes that a PAX record gives for the member at byte `at`."""
        if not digits.isdigit() or len(digits) > _MAX_SIZE_DIGITS:
            raise self._corrupt(at, f"a PAX header gives the size {digits[:_SHOWN_DIGITS]!r}")
        return int(digits)

    def _end_of_sparse_map(self, at: int) -> int:
        """Return the offset after the map of the old GNU sparse header at byte `at`."""
        header = self._read(at, BLOCK_BYTES)
        is_extended = header[_IS_EXTENDED_IN_HEADER]
        at += BLOCK_BYTES
        while is_extended:
            block = self._read(at, BLOCK_BYTES)
            if len(block) < BLOCK_BYTES:
                raise self._truncated("inside a sparse member's header")
            is_extended = block[_IS_EXTENDED_IN_MAP]
            at += BLOCK_BYTES
        return at

    def _read(self, at: int, size_bytes: int) -> bytes:
        """Return bytes of the tar; they are read from the source unless the window has them."""
        begin = at - self._window_start  # not negative: the tar is walked in one direction
        if begin + size_bytes > len(self._window):
            # After a small member, the walk is still near the window.
            follows_small_member = begin < 2 * _WINDOW_BYTES
            window_bytes = _WINDOW_BYTES if follows_small_member else _WINDOW_AFTER_LARGE_BYTES
            self._window = self._source(at, size_bytes, max(size_bytes, window_bytes))
            self._window_start = at
            begin = 0
        return self._window[begin : begin + size_bytes]

    def _truncated(self, where: str, remedy: str | None = None) -> TruncatedShardError:
        return TruncatedShardError(
            f"the tar ends at byte {self._size_bytes}, {where}",
            url=self._url,
            remedy=remedy,
        )

    def _corrupt(self, at: int, what: str) -> CorruptShardError:
        return CorruptShardError(f"damaged at byte {at}: {what}", url=self._url)

    def _not_a_tar(self, block: bytes) -> ShardError:
        for magic, (format_, suffix) in _MAGIC.items():
            if block.startswith(magic):
                return NotATarError(
                    f"this is {format_} data, not a plain tar",
                    url=self._url,
                    remedy=f"if it is a compressed tar, rename it to end in {suffix}",
                )
        if len(block) < BLOCK_BYTES:
            return NotATarError(
                f"the file has {len(block)} bytes, less than one tar header",
                url=self._url,
            )
        first_bytes = block[:_SHOWN_MAGIC_BYTES]
        return NotATarError(f"not a tar: the file begins with {first_bytes!r}", url=self._url)


def _normalized(name: bytes) -> bytes:
    """Return a path in the form in which the targets of hard links are looked up.

    GNU tar writes `./a` and `a` for the same file.
    """
    return normpath(name).lstrip(b"/")


def _without_unused(records: Records) -> Records:
    """Drop unused records to save memory: a damaged or hostile header may have a million."""
    used = {keyword: value for keyword, value in records.items() if keyword in _USED_KEYWORDS}
    if any(keyword.startswith(_SPARSE) for keyword in records):
        used[_SPARSE] = b""  # only the presence of such records matters
    return used
