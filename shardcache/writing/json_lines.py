"""Files of lines as an input: each line of JSONL becomes a sample.

`JsonLines` is the `Source` for files in JSON Lines, plain or compressed. Lines may be packed: many
lines are then written to one member of the tar, since a member per line would take a kilobyte for a
line of a hundred bytes (`tarindex.packed_lines`).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.errors import InputError, ShardError
from shardcache.store.codecs import Codec, codec_errors
from shardcache.tarindex.packed_lines import LINES_FOLDER
from shardcache.writing.sample_tar import Sample, member_bytes
from shardcache.writing.sources import InputFile

_CODECS = {".gz": Codec.GZIP, ".zst": Codec.ZSTD, ".bz2": Codec.BZIP2}
_COMPRESSIONS = ("", *_CODECS)
LINE_SUFFIXES = tuple(
    name + compression for name in (".jsonl", ".ndjson") for compression in _COMPRESSIONS
)
_KEY = "%09d"  # a sample's key is the number of its line
_MEMBER_NAME_BYTES = len("000000000.json")
_BLOCK_BYTES = 1024**2  # a member of packed lines has about this size
# When lines are cut into shards, a packed line counts as at least this size, since its entry in the
# index takes as much space on a reader's disk.
_MIN_LINE_BYTES = 64


class JsonLines:
    """The lines of JSONL files, one after another.

    Each line becomes a sample, whose key is the line's number. Lines are counted from 0 through all
    files. Blank lines are counted, but make no samples. The position of a sample is the number of
    its file, the offset of its line in the file's content in bytes, and the line's number.

    An offset in a compressed file is reached only by decompressing all bytes before it. A
    compressed file therefore stays open after a read, so that reads at ascending positions
    decompress it once.

    Args:
        files: the files, each as the values of an `InputFile`.
        field: the field whose text is the sample's member `txt`; None to write the whole line,
            unchanged, as the member `json`.
        pack: True to write members of many lines, False to write a member for each line.
    """

    def __init__(self, files: Sequence[Sequence[Any]], field: str | None, pack: bool) -> None:
        self._files = [InputFile(*values) for values in files]
        self._field = field
        self._pack = pack
        # The compressed file read last: its number in `files`, and its content.
        self._inflated: tuple[int, BinaryIO] | None = None

    def positions(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield size and position of each sample, as `Source.positions`.

        The sizes are those of whole lines, even if only a field of each line is written.
        """
        number = 0
        for file_number in range(len(self._files)):
            offset = 0
            with self._opened(file_number, offset=0) as lines:
                for line in lines:
                    line_bytes = len(line)
                    if not line.isspace():
                        yield self._space_bytes(line_bytes), (file_number, offset, number)
                    offset += line_bytes
                    number += 1

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """Yield the samples between two positions, as `Source.read`."""
        lines = self._lines(first, last)
        if self._pack:
            yield from _packed(lines)
            return
        for number, line, path in lines:
            if not line.isspace():
                yield Sample(_KEY % number, (self._member(line, number, path),))

    def _space_bytes(self, line_bytes: int) -> int:
        """Return the space of a line in a shard, with its share of headers and padding."""
        if not self._pack:
            return member_bytes(_MEMBER_NAME_BYTES, line_bytes)
        # The header and the padding of a member are shared by its lines. They are at most 1/1024 of
        # a member of packed lines, so 1/512 is a safe estimate.
        share_bytes = line_bytes // 512 + 1
        return max(_MIN_LINE_BYTES, line_bytes + share_bytes)

    def _lines(self, first: Sequence[int], last: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
        """Yield number, content and path of each line between two positions, blank or not."""
        first_file, offset, number = first
        last_file, _, last_number = last
        for file_number in range(first_file, last_file + 1):
            path = self._files[file_number].path
            with self._opened(file_number, offset) as lines:
                for line in lines:
                    yield number, line, path
                    if number == last_number:
                        return
                    number += 1
            offset = 0  # the next file is read from its beginning

    @contextmanager
    def _opened(self, file_number: int, offset: int) -> Iterator[BinaryIO]:
        """Yield a file's content, decompressed, from an offset on. Raises InputError."""
        file = self._files[file_number]
        codec = _CODECS.get(Path(file.path).suffix.lower())
        if codec is None:
            with file.open() as lines:
                lines.seek(offset)
                yield lines
            return

        inflated = self._inflated_file(file_number, codec)
        try:
            with codec_errors(codec, file.path):
                inflated.seek(offset)
                yield inflated
        except ShardError as exn:
            raise InputError(
                exn.message,
                url=file.path,
                remedy="compress the file again, or leave it out",
            ) from exn

    def _inflated_file(self, file_number: int, codec: Codec) -> BinaryIO:
        """Return the content of a compressed file; it stays open until another file is read."""
        if self._inflated is not None:
            opened_number, inflated = self._inflated
            if opened_number == file_number:
                return inflated
            inflated.close()
        file = self._files[file_number]
        file.open().close()  # raises if the file has changed since it was listed
        inflated = codec.open(Path(file.path))
        self._inflated = file_number, inflated
        return inflated

    def _member(self, line: bytes, number: int, path: str) -> tuple[str, bytes]:
        """Return extension and content of the member for a line. Raises InputError.

        Args:
            line: the line.
            number: number of the line, for the error.
            path: path of the line's file, for the error.
        """
        if self._field is None:
            return "json", line.rstrip(b"\r\n")
        try:
            text = json.loads(line)[self._field]
            if isinstance(text, str):
                return "txt", text.encode()
            reason = f"its {self._field!r} is not a text"
        except (KeyError, TypeError):
            reason = f"it has no field {self._field!r}"
        except UnicodeEncodeError:
            reason = f"its {self._field!r} has half a surrogate pair, which UTF-8 cannot encode"
        except ValueError as exn:
            reason = f"it is not JSON ({exn})"
        raise InputError(
            f"line {number:,}, counted from 0 through all files, cannot be used: {reason}",
            url=path,
            remedy="correct the line, or write whole lines, without --field",
        )


def _packed(lines: Iterator[tuple[int, bytes, str]]) -> Iterator[Sample]:
    """Yield members of packed lines: blocks of about a mebibyte, named by their first line.

    Blank lines become empty lines, which readers count and leave out.
    """
    block: list[bytes] = []
    block_bytes = 0
    first_number = 0
    for number, line, _ in lines:
        if not block:
            first_number = number
        block.append(line)
        block_bytes += len(line)
        if block_bytes >= _BLOCK_BYTES:
            yield _packed_block(first_number, block)
            block = []
            block_bytes = 0
    if block:
        yield _packed_block(first_number, block)


def _packed_block(first_number: int, lines: list[bytes]) -> Sample:
    """Return the member with these lines, whose `count` is the number of lines not blank."""
    texts = [b"" if line.isspace() else line.rstrip(b"\r\n") for line in lines]
    content = b"\n".join(texts) + b"\n"
    samples = sum(1 for text in texts if text)
    return Sample(f"{LINES_FOLDER}/{_KEY % first_number}", (("json", content),), samples)
