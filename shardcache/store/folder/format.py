"""The format number of a cache folder, kept in a file of its own.

A release that changes names or formats in the folder increments the number and migrates older folders in `mark`; an
older release then refuses the folder instead of taking every shard in it for damaged. The first releases wrote no
number; except for that, their folders have format 1.
"""

from __future__ import annotations

import contextlib

import structlog

from shardcache.errors import CacheFormatError
from shardcache.store.disk.files import replace_file
from shardcache.store.folder.layout import Layout

FORMAT = 1
_UNMARKED = 0

log = structlog.get_logger()


def check(layout: Layout) -> None:
    """Raise CacheFormatError if this release cannot use an existing folder. Changes nothing. Blocks."""
    found = _read(layout)
    if found > FORMAT:
        raise CacheFormatError(
            f"the cache folder {layout.root} has format {found}, but this release supports formats up to {FORMAT}",
            remedy="start the newer release that wrote it, or give this one another --cache-dir; to discard the "
            "cached shards, remove the folder",
        )


def mark(layout: Layout) -> None:
    """Write the current format number to a locked folder, unless it is there already. Blocks."""
    with contextlib.suppress(OSError):  # a disk that cannot be written is still served from
        if _read(layout) == FORMAT:
            return
        replace_file(layout.format, layout.unfinished(layout.format), [f"{FORMAT}\n"])
        if layout.catalogue.exists():
            log.info("cache folder of an older release taken over", folder=str(layout.root), format=FORMAT)


def _read(layout: Layout) -> int:
    try:
        return int(layout.format.read_text())
    except FileNotFoundError:
        return _UNMARKED
    except ValueError:
        raise CacheFormatError(
            f"{layout.format} does not contain a number, so the cache folder's format is unknown",
            remedy="check that the path is a cache folder; if this or an older release wrote it, remove the file",
        ) from None
