"""Ranges of objects read from a daemon, message by message."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession

NOTED = "noted"
"""Name of the file, beside the cache folder, of the ranges that the daemon has granted."""


class Span(NamedTuple):
    """A range of an object; `end` is excluded."""

    url: str
    start: int
    end: int


def read_ranges(daemon: Daemon, spans: Sequence[Span], *, notes: bool = False) -> list[bytes]:
    """Read ranges one after another, and release each before the next; return their bytes.

    Args:
        notes: write down each range that was granted: the daemon must have it after its death.
    """
    urls = list(dict.fromkeys(span.url for span in spans))
    found = []
    with RawSession(daemon, job="ranges") as session:
        session.plan(urls, list(range(len(urls))), wanted="ranges")
        for span in spans:
            position = urls.index(span.url)
            last = span.end - 1
            grant = session.take(position, start=span.start, beyond=last, partial=True)
            assert grant["type"] != "error", grant["error"]
            found.append(granted_bytes(grant, span.start, span.end))
            if notes:
                _note(daemon.root, span)
            session.send(type="release", lease=grant["lease"])
            session.settle()
    return found


def granted_bytes(grant: dict[str, Any], start: int, end: int) -> bytes:
    """Return the bytes of a range from the file that was granted.

    Raises FileNotFoundError if the file has gone since the grant, as clients do; also if another
    file has its path.
    """
    path = grant["path"]
    with Path(path).open("rb") as file:
        descriptor = file.fileno()
        if "inode" in grant and os.fstat(descriptor).st_ino != grant["inode"]:
            raise FileNotFoundError(errno.ENOENT, "another file than the granted one", path)
        return os.pread(descriptor, end - start, start)


def _note(folder: Path, span: Span) -> None:
    with (folder / NOTED).open("a") as notes:
        notes.write(f"{json.dumps(span)}\n")


def noted(folder: Path) -> list[Span]:
    """Return the ranges that were written down in a folder."""
    notes = folder / NOTED
    if not notes.exists():
        return []
    return [Span(*json.loads(line)) for line in notes.read_text().splitlines()]
