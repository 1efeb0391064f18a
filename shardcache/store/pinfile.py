"""The pin file: one line of JSON per pinned url, so that pins survive restarts and the loss of the catalogue.

All functions block: call them in a thread.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from shardcache.errors import CacheError
from shardcache.store.disk import disk_errors, is_exhaustion, replace_file
from shardcache.store.folder import Layout, is_key

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned shard.

    Attributes:
        url: the shard's url, redacted as in its sidecar.
        key: cache key of the pinned version.
        size_bytes: its size in the cache; an estimate until it is cached.
        uids: the users who pinned it.
    """

    url: str
    key: str
    size_bytes: int
    uids: frozenset[int]

    def to_json(self) -> list[object]:
        """Return the pin as a JSON array."""
        return [self.url, self.key, self.size_bytes, sorted(self.uids)]

    @classmethod
    def from_json(cls, row: list[object]) -> Pin:
        """Build from the output of `to_json`. Raises ValueError or TypeError if it is malformed."""
        url, key, size_bytes, uids = row
        if not (isinstance(url, str) and isinstance(key, str) and is_key(key)):
            raise ValueError("not a pin")
        if not (type(size_bytes) is int and size_bytes >= 0 and isinstance(uids, list) and uids):
            raise ValueError("not a pin")
        return cls(url, key, size_bytes, frozenset(map(int, uids)))


def read_pins(layout: Layout) -> list[Pin]:
    """Return the pins; from a damaged file, those that can be read, keeping a copy of the file for inspection."""
    aside = layout.pins.with_name(f"{layout.pins.name}.damaged")
    try:
        lines = layout.pins.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as exn:
        if is_exhaustion(exn):
            raise
        log.error("cannot read pins; nothing is pinned", file=str(aside), cause=str(exn))
        with contextlib.suppress(OSError):  # the next pin must not overwrite the old file
            layout.pins.rename(aside)
        return []
    pins = [pin for line in lines if (pin := _pin(line)) is not None]
    if len(pins) < len(lines):
        log.error("pin file damaged; some pins lost", lost=len(lines) - len(pins), file=str(aside))
        with contextlib.suppress(OSError, CacheError):  # a disk that cannot be written: the next start logs it again
            shutil.copy(layout.pins, aside)
            write_pins(layout, pins)
    return pins


def _pin(line: bytes) -> Pin | None:
    try:
        return Pin.from_json(json.loads(line))
    except (ValueError, TypeError):
        return None


def write_pins(layout: Layout, pins: Iterable[Pin]) -> None:
    """Replace the pin file. Raises DiskError, which leaves the old file intact."""
    with disk_errors(layout.pins):
        lines = (f"{json.dumps(pin.to_json())}\n" for pin in pins)
        replace_file(layout.pins, layout.unfinished(layout.pins), lines)
