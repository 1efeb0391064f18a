"""Figures of one node's tier, from the access log of its nginx. Blocking."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from shardcache.cluster.tier_config import MIB

_CHUNK_BYTES = MIB  # read at a time; no line is longer
_MAX_LOG_BYTES = 64 * MIB


@dataclass(slots=True)
class TierFigures:
    """Requests that a node served as an owner since its tier was started, and its cached parts.

    Attributes:
        hits: requests answered from its disk.
        misses: requests for which it asked the store.
        refused: requests that were refused, such as those that the store did not permit.
        from_tier_bytes: of parts that it sent from its disk.
        from_store_bytes: of parts that it received from the store.
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
        if row["status"] != HTTPStatus.PARTIAL_CONTENT:
            self.refused += 1
        elif row["cache"] == "HIT":
            self.hits += 1
            self.from_tier_bytes += _number(row["sent_bytes"])
        else:
            self.misses += 1
            # nginx writes one number for each server that it asked, after commas or colons.
            received = str(row["received_bytes"]).replace(":", ",")
            self.from_store_bytes += sum(map(_number, received.split(",")))

    def measure(self, folder: Path) -> None:
        """Count the cached parts in a folder."""
        self.files = 0
        self.cached_bytes = 0
        for parent, _folders, names in os.walk(folder):
            for name in names:
                # Without a Path object for each of 100,000 files.
                path = os.path.join(parent, name)  # noqa: PTH118
                with suppress(FileNotFoundError):  # evicted in the meantime
                    self.cached_bytes += os.stat(path).st_size  # noqa: PTH116
                    self.files += 1


def _number(text: object) -> int:
    """Return a number in the log; 0 for "-", which stands for none."""
    digits = str(text).strip()
    return int(digits) if digits.isdigit() else 0


class AccessLog:
    """Reads the lines that nginx adds to its access log; keeps one previous file."""

    def __init__(self, path: Path, owner_port: int) -> None:
        """Read a log from its present end on.

        Args:
            path: the log's.
            owner_port: port of the requests that count. Those to the front, for this node's daemon,
                are passed on to an owner and counted there.
        """
        self._path = path
        self._owner_port = str(owner_port)
        self._position = path.stat().st_size if path.exists() else 0

    def read(self, figures: TierFigures) -> None:
        """Add the requests since the last call to `figures`."""
        for line in self._lines():
            with suppress(ValueError):  # the disk was full in the middle of a line
                row = json.loads(line)
                if row["port"] == self._owner_port:
                    figures.add(row)

    def rotate(self) -> bool:
        """Rename the log if it is large; return True if that was done.

        nginx has to reopen the log then. Call it after `read`.
        """
        if not self._path.exists() or self._path.stat().st_size < _MAX_LOG_BYTES:
            return False
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._position = 0
        return True

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines added since the last call, except one that is still being written."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read(_CHUNK_BYTES)
            while b"\n" in data:
                whole_lines, newline, _beginning_of_next = data.rpartition(b"\n")
                self._position += len(whole_lines + newline)
                file.seek(self._position)
                yield from whole_lines.splitlines()
                data = file.read(_CHUNK_BYTES)
