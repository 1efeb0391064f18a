"""Which format a cache folder has: one number for all that lies in it, in a file of its own.

A release that names or writes anything there in another way counts it up and brings older folders along in `mark`; an
older release then leaves the folder alone in place of taking every shard in it for damaged. The first releases wrote no
number; what they left is format 1 but for that.
"""

from __future__ import annotations

import contextlib

import structlog

from shardcache.errors import CacheFormatError
from shardcache.store.files import replace_file
from shardcache.store.layout import Layout

FORMAT = 1
_UNMARKED = 0

log = structlog.get_logger()


def check(layout: Layout) -> None:
    """Raise CacheFormatError unless this release can use the folder, or there is none yet. Changes nothing. Blocks."""
    found = _read(layout)
    if found > FORMAT:
        raise CacheFormatError(
            f"the cache folder {layout.root} has format {found}, and this release knows none above {FORMAT}",
            remedy="start the newer release that wrote it, or give this one another --cache-dir; to give up what is "
            "cached there, remove the folder",
        )


def mark(layout: Layout) -> None:
    """Note the present format in a folder that is held, if it is not noted yet. Blocks."""
    with contextlib.suppress(OSError):  # a disk that takes nothing is served from all the same
        if _read(layout) == FORMAT:
            return
        replace_file(layout.format, layout.unfinished(layout.format), [f"{FORMAT}\n"])
        if layout.catalogue.exists():
            log.info("an older release's cache folder is taken over", folder=str(layout.root), format=FORMAT)


def _read(layout: Layout) -> int:
    try:
        return int(layout.format.read_text())
    except FileNotFoundError:
        return _UNMARKED
    except ValueError:
        raise CacheFormatError(
            f"{layout.format} holds no number, so the cache folder's format is not known",
            remedy="see if the path is meant for a cache; if a release up to this one wrote it, remove the file",
        ) from None
