"""Files of lines as an input: each line of JSONL becomes a sample.

`JsonLines` is the `Source` for files in JSON Lines, plain or compressed. Lines may be packed: many
lines are then written as one member of the tar. A member of its own would take a kilobyte even for
a line of a hundred bytes. `tarindex.packed_lines` finds the lines again.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardcache.shared.exceptions import InputError, ShardError
from shardcache.shared.tarindex.packed_lines import LINES_FOLDER
from shardcache.store.codecs import Codec, codec_errors
from shardcache.writing.sample_tar import Sample, member_bytes
from shardcache.writing.sources import InputFile

_CODECS = {".gz": Codec.GZIP, ".zst": Codec.ZSTD, ".bz2": Codec.BZIP2}
_COMPRESSIONS = ("", *_CODECS)
LINE_SUFFIXES = tuple(
    name + compression for name in (".jsonl", ".ndjson") for compression in _COMPRESSIONS
)
_KEY = "%09d"  # a sample's key is the number of its line
_MEMBER_NAME_BYTES = len("000000000.json")
_PACKED_MEMBER_BYTES = 1024**2  # a member of packed lines has about this size
# When lines are cut into shards, a packed line counts as at least this size, since its entry in the
# index takes as much space on a reader's disk.
_MIN_PACKED_LINE_BYTES = 64


class JsonLines:
    """The lines of JSONL files, one after another.

    Each line becomes a sample, whose key is the line's number. Lines are counted from 0 through all
    files. Blank lines are counted, but make no samples. The position of a sample is (file number,
    offset, line number); the offset is that of the line in the file's decompressed content, in
    bytes.

    To reach an offset in a compressed file, all bytes before it have to be decompressed. The file
    therefore stays open after a read, so that reads at ascending positions decompress it once.

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
        # The compressed file that was opened last, and its number; both None before the first.
        self._inflated: BinaryIO | None = None
        self._inflated_number: int | None = None

    def sized_positions(self) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Yield size and position of each sample, as `Source.sized_positions`.

        The sizes are those of whole lines, even if only a field of each line is written.
        """
        number = 0
        for file_number in range(len(self._files)):
            offset = 0
            with self._opened(file_number, offset=0) as lines:
                for line in lines:
                    line_bytes = len(line)
                    if not line.isspace():
                        position = (file_number, offset, number)
                        yield self._space_bytes(line_bytes), position
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
        """Return the space that a line takes in a shard, including headers and padding."""
        if not self._pack:
            return member_bytes(_MEMBER_NAME_BYTES, line_bytes)
        # Packed lines share the header and the padding of their member, which are at most 1/1024 of
        # it. So 1/512 is a safe estimate.
        share_bytes = line_bytes // 512 + 1
        return max(_MIN_PACKED_LINE_BYTES, line_bytes + share_bytes)

    def _lines(self, first: Sequence[int], last: Sequence[int]) -> Iterator[tuple[int, bytes, str]]:
        """Yield (number, content, path of its file) for each line between two positions.

        Blank lines are yielded, too.
        """
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
        """Open a file's decompressed content at an offset. Raises InputError."""
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
            if self._inflated_number == file_number:
                return self._inflated
            self._inflated.close()
        file = self._files[file_number]
        file.open().close()  # raises if the file has changed since it was listed
        self._inflated = codec.open(Path(file.path))
        self._inflated_number = file_number
        return self._inflated

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
    """Yield members of packed lines, each of about a mebibyte and named by its first line.

    Args:
        lines: the number, the content and the file's path of each line, as from `_lines`.
    """
    pending: list[bytes] = []
    pending_bytes = 0
    first_number = 0
    for number, line, _ in lines:
        if not pending:
            first_number = number
        pending.append(line)
        pending_bytes += len(line)
        if pending_bytes >= _PACKED_MEMBER_BYTES:
            yield _packed_member(first_number, pending)
            pending = []
            pending_bytes = 0
    if pending:
        yield _packed_member(first_number, pending)


def _packed_member(first_number: int, lines: list[bytes]) -> Sample:
    """Return the member with these lines, whose `count` is the number of lines that are not blank.

    Blank lines become empty lines, which readers count, so that the numbers of lines stay right.
    """
    texts = [b"" if line.isspace() else line.rstrip(b"\r\n") for line in lines]
    content = b"\n".join(texts) + b"\n"
    count = sum(1 for text in texts if text)
    return Sample(f"{LINES_FOLDER}/{_KEY % first_number}", (("json", content),), count)
