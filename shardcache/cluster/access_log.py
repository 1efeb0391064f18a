"""Figures of one node's tier, counted from the access log of its nginx.

`node_tier` reads the log every few seconds; the functions block. A line of the log is a JSON object
about one request. The owner of a part, which is a range of an object, is the node that fetches and
caches it.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from shardcache.cluster.tier_config import MIB

_CHUNK_BYTES = MIB  # size of the pieces in which the log is read; no line is longer
_MAX_LOG_BYTES = 64 * MIB


@dataclass(slots=True)
class TierFigures:
    """Requests that a node served as an owner since its tier was started, and its cached parts.

    Attributes:
        hits: number of requests that the node answered from its disk.
        misses: number of requests for which the node asked the object store.
        refused: number of refused requests, such as those that the object store did not permit.
        from_tier_bytes: bytes of parts that the node sent from its disk.
        from_store_bytes: bytes of parts that the node received from the object store.
        files: number of cached parts.
        cached_bytes: size of all cached parts.
    """

    hits: int = 0
    misses: int = 0
    refused: int = 0
    from_tier_bytes: int = 0
    from_store_bytes: int = 0
    files: int = 0
    cached_bytes: int = 0

    def add_request(self, row: dict[str, object]) -> None:
        """Add one request that the node served as an owner; `row` is the log's JSON object."""
        # A part is a range of an object, so every successful answer has the status 206.
        if row["status"] != HTTPStatus.PARTIAL_CONTENT:
            self.refused += 1
        elif row["cache"] == "HIT":
            self.hits += 1
            self.from_tier_bytes += _number(row["sent_bytes"])
        else:
            self.misses += 1
            # nginx writes a number for each server that it asked, separated by commas or colons.
            numbers = str(row["received_bytes"]).replace(":", ",").split(",")
            self.from_store_bytes += sum(map(_number, numbers))

    def measure(self, folder: Path) -> None:
        """Count the cached parts in a folder and their bytes."""
        self.files = 0
        self.cached_bytes = 0
        for parent, _folders, names in os.walk(folder):
            for name in names:
                # Path objects would be too slow for 100,000 files.
                path = os.path.join(parent, name)  # noqa: PTH118
                with suppress(FileNotFoundError):  # nginx has just evicted the part
                    self.cached_bytes += os.stat(path).st_size  # noqa: PTH116
                    self.files += 1


def _number(text: object) -> int:
    """Return a number in the log; 0 for "-", which nginx writes if there is no number."""
    digits = str(text).strip()
    return int(digits) if digits.isdigit() else 0


class AccessLog:
    """Reads the lines that nginx adds to its access log, and rotates the log.

    One old file is kept.
    """

    def __init__(self, path: Path, owner_port: int) -> None:
        """Begin at the current end of the log.

        Args:
            path: path of the log.
            owner_port: port at which the node serves as an owner; only its requests count. Those of
                this node's daemon come to a Unix socket, and are counted by the owner to which
                nginx passes them.
        """
        self._path = path
        self._owner_port = str(owner_port)
        # Offset in the file up to which it was read.
        self._read_to = path.stat().st_size if path.exists() else 0

    def read(self, figures: TierFigures) -> None:
        """Add the requests since the last call to `figures`."""
        for line in self._lines():
            # A line that is not JSON is skipped: the disk was full while nginx wrote it.
            with suppress(ValueError):
                row = json.loads(line)
                if row["port"] == self._owner_port:
                    figures.add_request(row)

    def rotate(self) -> bool:
        """Rename the log if it is large; return whether it was renamed.

        If so, the caller has to make nginx reopen its log. Call `read` first: what was not read by
        now of the renamed file is lost.
        """
        if not self._path.exists() or self._path.stat().st_size < _MAX_LOG_BYTES:
            return False
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._read_to = 0
        return True

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines added since the last call, without a line that is still being written."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read_to)
            data = file.read(_CHUNK_BYTES)
            while b"\n" in data:
                whole_lines, newline, _beginning_of_next = data.rpartition(b"\n")
                self._read_to += len(whole_lines + newline)
                yield from whole_lines.splitlines()
                file.seek(self._read_to)  # to read the next line from its beginning
                data = file.read(_CHUNK_BYTES)
