"""What is pinned, on disk: a line of JSON for each url, so that it outlives restarts and a lost catalogue. All of it
blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from shardcache.errors import DiskError
from shardcache.store.files import disk_errors, replace_file
from shardcache.store.layout import Layout, is_key

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Pin:
    """A url whose shard stays.

    Attributes:
        url: without its secrets, as the shard's sidecar has it.
        key: of the version that stays.
        size_bytes: what that takes in the cache; estimated until it is there.
        uids: the users who have pinned it.
    """

    url: str
    key: str
    size_bytes: int
    uids: frozenset[int]

    def to_json(self) -> list[object]:
        """Return the pin's line."""
        return [self.url, self.key, self.size_bytes, sorted(self.uids)]

    @classmethod
    def from_json(cls, row: list[object]) -> Pin:
        """Build from what `to_json` gave. Raises ValueError or TypeError where it is none."""
        url, key, size_bytes, uids = row
        if not (isinstance(url, str) and isinstance(key, str) and is_key(key)):
            raise ValueError("no pin")
        if not (type(size_bytes) is int and size_bytes >= 0 and isinstance(uids, list) and uids):
            raise ValueError("no pin")
        return cls(url, key, size_bytes, frozenset(map(int, uids)))


def read_pins(layout: Layout) -> list[Pin]:
    """Return what was pinned; of a file that is damaged what can be read, and a copy of it stays for a look."""
    try:
        lines = layout.pins.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as exn:
        log.error("the pins cannot be read, nothing is pinned", file=str(_aside(layout)), cause=str(exn))
        with contextlib.suppress(OSError):  # the next who pins something must not write over them
            layout.pins.rename(_aside(layout))
        return []
    pins = [pin for line in lines if (pin := _pin(line)) is not None]
    if len(pins) < len(lines):
        _mend(layout, pins, lost=len(lines) - len(pins))
    return pins


def _mend(layout: Layout, pins: list[Pin], lost: int) -> None:
    """Put a damaged file aside, and what could be read of it in its place."""
    log.error("some pins cannot be read and are lost", lost=lost, file=str(_aside(layout)))
    with contextlib.suppress(OSError, DiskError):  # a disk that takes nothing: the next start says so again
        shutil.copy(layout.pins, _aside(layout))
        write_pins(layout, pins)


def _aside(layout: Layout) -> Path:
    return layout.pins.with_name(f"{layout.pins.name}.damaged")


def _pin(line: bytes) -> Pin | None:
    try:
        return Pin.from_json(json.loads(line))
    except (ValueError, TypeError):
        return None


def write_pins(layout: Layout, pins: Iterable[Pin]) -> None:
    """Note what is pinned. Raises DiskError; what was noted before then still is."""
    with disk_errors(layout.pins):
        lines = (f"{json.dumps(pin.to_json())}\n" for pin in pins)
        replace_file(layout.pins, layout.unfinished(layout.pins), lines)
