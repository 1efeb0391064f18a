"""Files of lines: each line becomes a sample, whose key is its number."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from shardcache.errors import InputError
from shardcache.writing.plan.samples import Sample
from shardcache.writing.plan.tar import member_bytes
from shardcache.writing.sources.source import open_unchanged

_KEY = "%09d"
_KEY_CHARS = 9


class JsonLines:
    """The lines of JSONL files, one after another; a position is (file, offset in bytes, number of the line).

    Lines are counted from 0 through all files. Blank lines are counted, and skipped.

    Args:
        files: facts of each file.
        field: if given, each sample is the text of this field as `txt`, otherwise the line, unchanged, as `json`.
    """

    def __init__(self, files: Sequence[Sequence[Any]], field: str | None) -> None:
        self._files = files
        self._field = field

    def positions(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """As `Source.positions`; sizes are those of the lines, of which the field is a part."""
        number = 0
        name_bytes = _KEY_CHARS + len(".json")
        for file, fact in enumerate(self._files):
            at = 0
            with open_unchanged(fact) as lines:
                for line in lines:
                    if not line.isspace():
                        yield member_bytes(name_bytes, len(line)), (file, at, number)
                    at += len(line)
                    number += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        file, at, number = first
        for fact in self._files[file : last[0] + 1]:
            with open_unchanged(fact) as lines:
                lines.seek(at)
                for line in lines:
                    if not line.isspace():
                        yield Sample(_KEY % number, (self._member(line, number, fact[0]),))
                    if number == last[2]:
                        return
                    number += 1
            at = 0

    def _member(self, line: bytes, number: int, path: str) -> tuple[str, bytes]:
        if self._field is None:
            return "json", line.rstrip(b"\r\n")
        try:
            text = json.loads(line)[self._field]
            if isinstance(text, str):
                return "txt", text.encode("utf-8", "surrogateescape")
            reason = f"its {self._field!r} is not a text"
        except (ValueError, KeyError, TypeError) as exn:
            missing = isinstance(exn, (KeyError, TypeError))
            reason = f"it has no field {self._field!r}" if missing else f"it is not JSON ({exn})"
        raise InputError(
            f"line {number:,}, counted from 0 through all files, cannot be used: {reason}",
            url=path,
            remedy="correct the line, or write whole lines, without --field",
        )
