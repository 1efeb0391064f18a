"""The file of pins, with one line of JSON for each pin.

A pin is a user's order to keep a shard cached until it is unpinned. The file is read when the
daemon starts, and replaced whenever the pins change. All functions block.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from shardcache.shared.exceptions import CacheError
from shardcache.store.disk.disk_errors import disk_error, disk_errors, is_exhaustion
from shardcache.store.disk.file_operations import replace_file
from shardcache.store.folder.layout import Layout
from shardcache.store.keys import is_key

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned shard.

    Attributes:
        url: the shard's url, without secrets, as in the shard's sidecar.
        key: cache key of the pinned version.
        size_bytes: size in the cache; an estimate until the shard is cached.
        uids: ids of the users who have pinned the shard.
    """

    url: str
    key: str
    size_bytes: int
    uids: frozenset[int]

    def to_line(self) -> str:
        """Return the pin's line in the file, a JSON array."""
        return json.dumps([self.url, self.key, self.size_bytes, sorted(self.uids)]) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Pin | None":
        """Return the pin of a line; None if the line is damaged."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return None
        match fields:
            case [str(url), str(key), int(size_bytes), [_, *_] as uids]:
                # `isinstance` would accept True, too, as a bool is an int.
                are_ids = all(type(uid) is int for uid in uids)
                if is_key(key) and size_bytes >= 0 and are_ids:
                    return cls(url, key, size_bytes, frozenset(uids))
        return None


def read_pins(layout: Layout) -> list[Pin]:
    """Return the pins that can be read. Blocks. Raises ExhaustedError.

    A damaged file is copied to another name, and rewritten without its damaged lines. A file that
    cannot be read is renamed.
    """
    damaged_file = layout.pins.with_name(f"{layout.pins.name}.damaged")
    try:
        lines = layout.pins.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as exn:
        if is_exhaustion(exn):
            raise disk_error(exn, layout.pins) from exn
        log.error("cannot read pins; nothing is pinned", file=str(damaged_file), cause=str(exn))
        # The file is renamed, so that the next pin does not overwrite it.
        with contextlib.suppress(OSError):
            layout.pins.rename(damaged_file)
        return []

    parsed = [Pin.from_line(line) for line in lines]
    pins = [pin for pin in parsed if pin is not None]
    lost = len(lines) - len(pins)
    if lost:
        log.error("pin file damaged; some pins lost", lost=lost, file=str(damaged_file))
        # If the disk cannot be written, the damage stays, and the next start logs it again.
        with contextlib.suppress(OSError, CacheError):
            shutil.copy(layout.pins, damaged_file)
            write_pins(layout, pins)
    return pins


def write_pins(layout: Layout, pins: Iterable[Pin]) -> None:
    """Replace the pin file. Blocks. Raises DiskError, which leaves the old file intact."""
    with disk_errors(layout.pins):
        lines = (pin.to_line() for pin in pins)
        replace_file(layout.pins, layout.replacement_of(layout.pins), lines)
