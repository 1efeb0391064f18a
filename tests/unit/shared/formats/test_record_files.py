"""TFRecord and ArrayRecord files of Google's libraries: tests/data/formats/make_records.py."""

import lzma
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardcache.errors import (
    CorruptShardError,
    MissingPackageError,
    ShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats.format import Format, IndexOptions
from shardcache.shared.formats.records.array_record import ARRAY_RECORD
from shardcache.shared.formats.records.tfrecord import TFRECORD
from shardcache.shared.formats.zstd_library import zstd_library
from shardcache.transport.between.checksums import crc32c
from support import TESTS

URL = "s3://bucket/train"
DATA = TESTS / "data" / "formats"

EXAMPLES = [
    {
        "image": bytes([number]) * 9000 * number,
        "label": number - 3,
        "box": [0.5, float(number), -1.25, 4.0],
        "tokens": list(range(number * 100, number * 100 + 40)),
        "names": [b"a", b"b"],
    }
    for number in range(12)
]


def written(path: Path, name: str) -> Path:
    path.write_bytes(lzma.decompress((DATA / f"{name}.xz").read_bytes()))
    return path


def read(format_: Format, path: Path) -> list[dict[str, Any]]:
    """Return the samples of a file as a reader has them, lists in place of arrays."""
    stream = format_.stored_copy(path, URL)
    if stream is not None:
        with stream:
            path.write_bytes(stream.read())
    data = path.read_bytes()
    samples = format_.index(path, URL, IndexOptions(crc32c=crc32c))
    decoders = [format_.decoder(encoding) for encoding in samples.encodings]
    rows = []
    begin = 0
    for end in samples.member_ends:
        row = {}
        for member in range(begin, end):
            column = samples.extension_ids[member]
            cell = data[samples.starts[member] : samples.ends[member]]
            decode: Callable[[bytes], Any] = decoders[column] or bytes
            value = decode(cell)
            row[samples.extensions[column]] = (
                value.tolist() if isinstance(value, np.ndarray) else value
            )
        rows.append(row)
        begin = end
    return rows


def test_file_of_tensorflow_is_read(tmp_path: Path) -> None:
    """Numbers, lists of them, and bytes."""
    assert read(TFRECORD, written(tmp_path / "a.tfrecord", "examples.tfrecord")) == EXAMPLES


@pytest.mark.parametrize("name", ["zstd", "groups", "plain"])
def test_file_of_array_record_is_read(tmp_path: Path, name: str) -> None:
    """Records in chunks of their own and in groups, compressed or not, are read."""
    path = written(tmp_path / "a.array_record", f"{name}.array_record")
    assert path.stat().st_size >= 2 * 64 * 1024
    assert read(ARRAY_RECORD, path) == EXAMPLES


def test_brotli_needs_its_library(tmp_path: Path) -> None:
    """Without it, the error says what to install, and where."""
    path = written(tmp_path / "a.array_record", "brotli.array_record")
    try:
        assert read(ARRAY_RECORD, path) == EXAMPLES
    except MissingPackageError as exn:
        assert "pip install brotli" in str(exn)


def test_transposed_records_are_an_error(tmp_path: Path) -> None:
    """The error names the option that writes others."""
    path = written(tmp_path / "a.array_record", "transposed.array_record")
    with pytest.raises(UnsupportedShardError, match="transposed") as caught:
        read(ARRAY_RECORD, path)
    assert "transpose:false" in str(caught.value)


@pytest.mark.parametrize("left_bytes", [0, 100, 70_000, -65_536])
def test_part_of_an_array_record_file_is_an_error(tmp_path: Path, left_bytes: int) -> None:
    """The error does not depend on where the part ends."""
    path = written(tmp_path / "a.array_record", "groups.array_record")
    path.write_bytes(path.read_bytes()[:left_bytes])
    with pytest.raises(CorruptShardError, match="the ArrayRecord file is damaged"):
        read(ARRAY_RECORD, path)


@pytest.mark.parametrize("lost_bytes", [1, 500])
def test_cached_copy_that_was_cut_is_an_error(tmp_path: Path, lost_bytes: int) -> None:
    """Within its last record; a record of another length would be a sample of other values."""
    path = written(tmp_path / "a.array_record", "groups.array_record")
    copy = tmp_path / "copy"
    stream = ARRAY_RECORD.stored_copy(path, URL)
    assert stream is not None
    with stream:
        copy.write_bytes(stream.read()[:-lost_bytes])
    with pytest.raises(CorruptShardError, match="ends inside a record"):
        ARRAY_RECORD.index(copy, URL, IndexOptions(crc32c=crc32c))


def varint_of(number: int) -> bytes:
    low = number & 0x7F
    high = number >> 7
    return bytes([low | 0x80]) + varint_of(high) if high else bytes([low])


def riegeli_chunk(records: int, sizes: bytes, values: bytes, compression: bytes = b"\0") -> bytes:
    """Return a chunk of records, without hashes, which are not compared."""
    data = compression + varint_of(len(sizes)) + sizes + values
    return struct.pack("<5Q", 0, len(data), 0, records << 8 | ord("r"), 0) + data


def riegeli_blocks(*chunks: bytes) -> bytes:
    """Return a file with each chunk at the beginning of a block of its own."""
    return b"".join((bytes(24) + chunk).ljust(65_536, b"\0") for chunk in chunks)


def array_record_file(path: Path, chunk: bytes, records: int) -> Path:
    """Write a chunk of one block at most, within a file that has `records` of them."""
    count = b"\x18" + varint_of(records)
    footer = b"\x0a" + varint_of(len(count)) + count
    postscript = b"\x08" + varint_of(65_536) + b"\x10" + varint_of(0x71930E704FDAE05E)
    padding_bytes = 65_536 - 24 - len(chunk) - 40
    padding = struct.pack("<5Q", 0, padding_bytes, 0, ord("p"), 0) + bytes(padding_bytes)
    path.write_bytes(
        riegeli_blocks(
            chunk + padding,
            riegeli_chunk(1, varint_of(len(footer)), footer),
            riegeli_chunk(1, varint_of(len(postscript)), postscript),
        )
    )
    return path


def compressed(content: bytes) -> bytes:
    return varint_of(len(content)) + zstd_library().compress(content)


def test_chunk_of_more_records_than_the_file_has_gives_none(tmp_path: Path) -> None:
    """A million empty records take a hundred compressed bytes, and 8 MB in the cache each time."""
    chunk = riegeli_chunk(1_000_000, compressed(bytes(1_000_000)), compressed(b""), b"z")
    path = array_record_file(tmp_path / "a.array_record", chunk, 3)
    with ARRAY_RECORD.stored_copy(path, URL) as stream:
        stream.read(len(b"shardrec"))
        with pytest.raises(CorruptShardError, match="the chunk at byte 0 has 1000000 records"):
            stream.read(1)


def test_large_record_passes_through_little_memory(tmp_path: Path) -> None:
    """The daemon copies it piece by piece, perhaps with several files at once."""
    size_bytes = 64_000_000
    chunk = riegeli_chunk(1, compressed(varint_of(size_bytes)), compressed(bytes(size_bytes)), b"z")
    path = array_record_file(tmp_path / "a.array_record", chunk, 1)
    tracemalloc.start()
    try:
        with ARRAY_RECORD.stored_copy(path, URL) as stream:
            copied = sum(iter(lambda: len(stream.read(100_000)), 0))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert copied == len(b"shardrec") + 8 + size_bytes
    assert peak_bytes < size_bytes / 10


@pytest.mark.parametrize(
    ("sizes", "values", "what"),
    [
        (compressed(b"\x05"), varint_of(9) + compressed(b"12345")[1:], "another size than it says"),
        (compressed(b"\x05"), varint_of(4) + compressed(b"12345")[1:], "another size than it says"),
        (compressed(b"\x06"), compressed(b"12345"), "a record ends early"),
        (compressed(b""), compressed(b"12345"), "a number has no end"),
        (compressed(b"\x05"), compressed(b"12345")[:-3], "another size than it says"),
        (compressed(b"\x05"), varint_of(5) + b"12345", "cannot be decompressed"),
        (compressed(b"\x05"), varint_of(1 << 40) + compressed(b"12345")[1:], "is said to have"),
    ],
)
def test_buffers_that_lie_are_damage(
    tmp_path: Path, sizes: bytes, values: bytes, what: str
) -> None:
    """About their own sizes, or those of records."""
    path = array_record_file(tmp_path / "a.array_record", riegeli_chunk(1, sizes, values, b"z"), 1)
    with (
        ARRAY_RECORD.stored_copy(path, URL) as stream,
        pytest.raises(CorruptShardError, match=what),
    ):
        stream.read()


@pytest.mark.slow
def test_damage_is_a_shard_error(tmp_path: Path) -> None:
    """A changed byte around records is an error of the file or of a sample."""
    whole = written(tmp_path / "a.array_record", "plain.array_record").read_bytes()
    path = tmp_path / "damaged.array_record"
    for at in [*range(64, 200), *range(len(whole) - 65_536, len(whole) - 65_536 + 120)]:
        data = bytearray(whole)
        data[at] ^= 0x55
        path.write_bytes(data)
        try:
            read(ARRAY_RECORD, path)
        except (ShardError, ValueError):  # the latter is a sample's, to its reader
            continue
