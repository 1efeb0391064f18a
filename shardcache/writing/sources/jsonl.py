"""Files of lines, compressed or not: each line becomes a sample, whose key is its number."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.errors import InputError, ShardError
from shardcache.store.inflate import Codec, codec_errors
from shardcache.tarindex.grouping import FOLDER
from shardcache.writing.plan.samples import Sample
from shardcache.writing.plan.tar import member_bytes
from shardcache.writing.sources.source import open_unchanged

_CODECS = {".gz": Codec.GZIP, ".zst": Codec.ZSTD, ".bz2": Codec.BZIP2}

SUFFIXES = tuple(name + compression for name in (".jsonl", ".ndjson") for compression in ("", *_CODECS))
"""Ends of the names of such files."""

_KEY = "%09d"
_KEY_CHARS = 9
_BLOCK_BYTES = 1024**2
_LEAST_BYTES = 64  # what a line's entry in the index takes on a reader's disk


class JsonLines:
    """The lines of JSONL files, one after another; a position is (file, offset in bytes, number of the line).

    Lines are counted from 0 through all files. Blank lines are counted, and skipped. A compressed file stays open after
    reading from it: reads whose positions ascend decompress it once, as no offset in it can be reached otherwise.

    Args:
        files: facts of each file.
        field: if given, each sample is the text of this field as `txt`, otherwise the line, unchanged, as `json`.
        pack: write members of many lines, instead of a member for each.
    """

    def __init__(self, files: Sequence[Sequence[Any]], field: str | None, pack: bool) -> None:
        self._files = files
        self._field = field
        self._pack = pack
        self._inflated: tuple[int, BinaryIO] | None = None  # the compressed file read last, by number

    def positions(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """As `Source.positions`; sizes are those of the lines, of which the field is a part, or a little more."""
        number = 0
        name_bytes = _KEY_CHARS + len(".json")
        for file, fact in enumerate(self._files):
            at = 0
            with _open(fact) as lines, _errors(fact):
                for line in lines:
                    if not line.isspace():
                        size_bytes = _packed_bytes(len(line)) if self._pack else member_bytes(name_bytes, len(line))
                        yield size_bytes, (file, at, number)
                    at += len(line)
                    number += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        lines = self._lines(first, last)
        if self._pack:
            yield from _packed((number, line) for number, line, _ in lines)
            return
        for number, line, path in lines:
            if not line.isspace():
                yield Sample(_KEY % number, (self._member(line, number, path),))

    def _lines(self, first: Sequence[int], last: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
        """Yield number, line and file of each line from one position to another, blank lines included."""
        file, at, number = first
        for each in range(file, last[0] + 1):
            fact = self._files[each]
            with self._opened(each) as lines, _errors(fact):
                lines.seek(at)
                for line in lines:
                    yield number, line, fact[0]
                    if number == last[2]:
                        return
                    number += 1
            at = 0

    @contextmanager
    def _opened(self, file: int) -> Iterator[BinaryIO]:
        fact = self._files[file]
        if _codec(fact) is None:
            with open_unchanged(fact) as lines:
                yield lines
            return
        if self._inflated is None or self._inflated[0] != file:
            if self._inflated is not None:
                self._inflated[1].close()
            self._inflated = file, _open(fact)
        yield self._inflated[1]

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


def _codec(fact: Sequence[Any]) -> Codec | None:
    return _CODECS.get(Path(fact[0]).suffix.lower())


def _open(fact: Sequence[Any]) -> BinaryIO:
    """Return the lines of a file. Raises InputError."""
    codec = _codec(fact)
    plain = open_unchanged(fact)
    if codec is None:
        return plain
    with closing(plain):  # which was opened to check it
        return codec.open(Path(fact[0]))


@contextmanager
def _errors(fact: Sequence[Any]) -> Iterator[None]:
    """Translate the errors of a damaged compressed file into InputError."""
    codec = _codec(fact)
    if codec is None:
        yield
        return
    try:
        with codec_errors(codec, fact[0]):
            yield
    except ShardError as exn:
        raise InputError(exn.message, url=fact[0], remedy="compress the file again, or leave it out") from exn


def _packed(lines: Iterable[tuple[int, bytes]]) -> Iterator[Sample]:
    """Yield lines in blocks of about a mebibyte; blank ones as empty ones, which readers count and leave out."""
    block: list[bytes] = []
    first = size_bytes = 0
    for number, line in lines:
        if not block:
            first = number
        block.append(b"" if line.isspace() else line.rstrip(b"\r\n"))
        size_bytes += len(line)
        if size_bytes >= _BLOCK_BYTES:
            yield _block(first, block)
            block, size_bytes = [], 0
    if block:
        yield _block(first, block)


def _block(first: int, lines: Sequence[bytes]) -> Sample:
    content = b"\n".join(lines) + b"\n"
    return Sample(f"{FOLDER}/{_KEY % first}", (("json", content),), sum(map(bool, lines)))


def _packed_bytes(line_bytes: int) -> int:
    """Return the space of a line in a shard, with its share of a block's header and padding."""
    return max(_LEAST_BYTES, line_bytes + line_bytes // 512 + 1)
