"""Figures of a node's nginx: its access log summed up, and the parts on its disk. Blocking."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_READ_BYTES = 1 << 20
_MOST_LOG_BYTES = 64 << 20


@dataclass(slots=True)
class Figures:
    """Requests that a node served as an owner since its tier was started, and its cached parts.

    Attributes:
        hits: requests answered from its disk.
        misses: requests for which it asked the store.
        refused: requests that were refused, such as those that the store did not permit.
        from_tier_bytes: bytes of parts that it sent from its disk.
        from_store_bytes: bytes of parts that it received from the store.
        files: number of cached parts.
        cached_bytes: their size.
    """

    hits: int = 0
    misses: int = 0
    refused: int = 0
    from_tier_bytes: int = 0
    from_store_bytes: int = 0
    files: int = 0
    cached_bytes: int = 0

    def add(self, row: dict[str, object]) -> None:
        """Add one request to an owner."""
        if row["status"] != 206:
            self.refused += 1
        elif row["cache"] == "HIT":
            self.hits += 1
            self.from_tier_bytes += _number(row["sent_bytes"])
        else:
            self.misses += 1
            self.from_store_bytes += sum(map(_number, str(row["received_bytes"]).replace(":", ",").split(",")))

    def to_json(self) -> dict[str, int]:
        """Return the figures by name."""
        return asdict(self)


class AccessLog:
    """Reads what nginx adds to its access log; keeps one former file of it.

    Args:
        path: the log.
        owner_port: port of the requests that count: those to the front are repeated at the owner.
    """

    def __init__(self, path: Path, owner_port: int) -> None:
        self._path, self._owner_port = path, owner_port
        self._position = path.stat().st_size if path.exists() else 0

    def read(self, figures: Figures) -> None:
        """Add the lines since the last call."""
        for line in self._lines():
            try:
                row = json.loads(line)
            except ValueError:  # the disk was full in the middle of a line
                continue
            if row["port"] == self._owner_port:
                figures.add(row)

    def rotate(self) -> bool:
        """Set the log aside if it is large; nginx has to reopen it then. Call it after `read`."""
        if not self._path.exists() or self._path.stat().st_size < _MOST_LOG_BYTES:
            return False
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._position = 0
        return True

    def _lines(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            while data := file.read(_READ_BYTES):
                end = data.rfind(b"\n") + 1
                if end == 0:
                    return
                self._position += end
                file.seek(self._position)
                yield from data[:end].splitlines()


def measure(folder: Path, figures: Figures) -> None:
    """Count the cached parts in a folder."""
    files = cached_bytes = 0
    for where, _folders, names in os.walk(folder):
        for name in names:
            try:
                cached_bytes += os.stat(os.path.join(where, name)).st_size  # noqa: PTH116, PTH118  # of 100,000 files
                files += 1
            except FileNotFoundError:  # evicted meanwhile
                continue
    figures.files, figures.cached_bytes = files, cached_bytes


def _number(text: object) -> int:
    digits = str(text).strip()
    return int(digits) if digits.isdigit() else 0
