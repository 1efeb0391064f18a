"""Packed lines: samples that are the lines of one member of a tar (`shardcache write --pack`).

The member `__lines__/000001000.json` holds the samples 000001000, 000001001 and so on, one sample
per line. Packing saves space: in a member of its own, a line of a hundred bytes takes a kilobyte of
the tar. WebDataset skips members in a folder with a name such as `__lines__`.
"""

import re
from collections.abc import Iterable, Iterator

from shardcache.shared.exceptions import UnsupportedShardError
from shardcache.shared.tarindex.members import Member, Read

LINES_FOLDER = "__lines__"
"""Folder in a tar whose members hold lines."""

MAX_LINES = 8_000_000
"""Maximum number of lines in a shard, whose index takes some 50 bytes of memory per line."""

_LINES_PREFIX = b"__lines__/"
# The groups are the number of the first line, and the extension.
_LINES_NAME = re.compile(rb"__lines__/([0-9]{1,18})\.([^/]+)")
_PIECE_BYTES = 1024 * 1024


def split_lines(
    members: Iterable[Member],
    read: Read,
    url: str,
    max_lines: int = MAX_LINES,
) -> Iterator[Member]:
    """Yield the members of a tar, with each member that holds lines replaced by its lines.

    The key of the first line is the number in the member's name; each later line has the next
    number. Line feeds are left out, and so are empty lines, whose numbers are then missing.

    Raises UnsupportedShardError for more than `max_lines` lines, or lines in a hard link, and what
    `members` and `read` raise.

    Args:
        members: the members of the tar.
        read: reads bytes of the tar.
        url: url of the shard, for errors.
        max_lines: maximum number of lines in the tar.
    """
    count = 0  # number of lines so far
    lines_end = 0  # end of the last member with lines
    for member in members:
        name, start, end, fault = member
        match = None
        # `startswith` comes first, since it is much faster than the regular expression.
        if fault is None and name.startswith(_LINES_PREFIX):
            match = _LINES_NAME.fullmatch(name)
        if match is None:
            yield member
            continue

        # The content of a hard link is that of an earlier member. With links, a small tar could
        # repeat the lines of one large member many times, which would take hours to index.
        if start < lines_end:
            raise UnsupportedShardError(
                f"the member {name.decode(errors='replace')!r} is a hard link to other lines",
                url=url,
                remedy="write the shard with `tar --hard-dereference`",
            )
        lines_end = end
        digits, extension = match.groups()
        for index, line_start, line_end in _lines(read, start, end):
            count += 1
            if count > max_lines:
                raise UnsupportedShardError(
                    f"the shard has more than {max_lines:,} lines, whose index would take too "
                    "much memory",
                    url=url,
                    remedy="write smaller shards",
                )
            # The line's number has as many digits as the member's, with leading zeros.
            line_name = b"%0*d.%s" % (len(digits), int(digits) + index, extension)
            yield line_name, line_start, line_end, None


def _lines(read: Read, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield index, start and end of each line that is not empty, between two offsets in the tar.

    The index counts all lines from 0, empty lines included.
    """
    index = 0
    line_start = start
    at = start
    while at < end:
        # In a shard that is still arriving, this waits for 1 byte only, and takes what has arrived.
        piece = read(at, 1, min(_PIECE_BYTES, end - at))
        feed = piece.find(b"\n")
        while feed >= 0:
            line_end = at + feed
            if line_end > line_start:
                yield index, line_start, line_end
            index += 1
            line_start = line_end + 1
            feed = piece.find(b"\n", feed + 1)
        at += len(piece)
    if line_start < end:  # the last line has no line feed
        yield index, line_start, end
