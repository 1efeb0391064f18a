"""Members that hold one sample per line: `__lines__/000001000.json` is the samples 000001000, 000001001 and so on.

A sample in a member of its own costs a kilobyte of tar for a line of a hundred bytes. WebDataset skips members below
folders of such a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shardcache.errors import UnsupportedShardError
from shardcache.tarindex.members import Member, Read

FOLDER = "__lines__"
"""Folder of such members in a tar."""

MOST_LINES = 8_000_000
"""Limit for one shard: its index takes some 50 bytes of memory per line, however short the lines are."""

_NAME = re.compile(rb"__lines__/([0-9]{1,18})\.([^/]+)")
_PIECE_BYTES = 1024 * 1024


def split_lines(members: Iterable[Member], read: Read, url: str, most: int = MOST_LINES) -> Iterator[Member]:
    """Yield the members of a tar, with each that holds lines replaced by its lines, without their line feeds.

    Keys count on from the member's own; an empty line is counted, and left out.

    Args:
        read: source of the tar's bytes; its exceptions pass through.
        url: url for error messages.
        most: limit for the number of lines.

    Raises UnsupportedShardError for more lines, and what the iterable raises.
    """
    count = 0
    for member in members:
        name, start, end, sparse = member
        found = _NAME.fullmatch(name) if name.startswith(b"__lines__/") and not sparse else None
        if found is None:
            yield member
            continue
        digits, extension = found.groups()
        for number, first, stop in _lines(read, start, end):
            count += 1
            if count > most:
                raise UnsupportedShardError(
                    f"the shard has more than {most:,} lines, whose index would take too much memory",
                    url=url,
                    remedy="write smaller shards",
                )
            yield b"%0*d.%s" % (len(digits), int(digits) + number, extension), first, stop, False


def _lines(read: Read, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each line that is not empty, between two offsets in the tar."""
    number, first, at = 0, start, start
    while at < end:
        piece = read(at, 1, min(_PIECE_BYTES, end - at))
        feed = piece.find(b"\n")
        while feed >= 0:
            if at + feed > first:
                yield number, first, at + feed
            number, first = number + 1, at + feed + 1
            feed = piece.find(b"\n", feed + 1)
        at += len(piece)
    if first < end:
        yield number, first, end
