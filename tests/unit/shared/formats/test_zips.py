"""Zips: compared with `zipfile`; what is damaged, encrypted or a bomb is an error."""

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import CorruptShardError, ShardError, UnsupportedShardError
from shardcache.shared.formats import zips
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.tarindex.tables import Samples, key_of

URL = "s3://bucket/train.zip"
Rows = dict[str, dict[str, bytes]]

NAMES = st.from_regex(r"\A[a-cé]{1,2}(/[ab]{1,70})?\.(jpg|txt|seg\.png)\Z")
CONTENTS = st.binary(max_size=40) | st.integers(0, 3000).map(bytes)


def zipped(
    files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b""
) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.comment = comment
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def copied(path: Path) -> bytes | None:
    """Return what is cached of a zip; None for the zip itself."""
    stream = zips.ZIP.stored_copy(path, URL)
    if stream is None:
        return None
    with stream:
        return stream.read()


def rows_of(samples: Samples, data: bytes) -> Rows:
    rows: Rows = {}
    begin = 0
    for number, end in enumerate(samples.member_ends):
        row = rows.setdefault(key_of(samples, number), {})
        for member in range(begin, end):
            extension = samples.extensions[samples.extension_ids[member]]
            row[extension] = data[samples.starts[member] : samples.ends[member]]
        begin = end
    return rows


def expected(files: Mapping[str, bytes]) -> Rows:
    rows: Rows = {}
    for name, content in files.items():
        folder, slash, last = name.rpartition("/")
        key, _, extension = last.partition(".")
        rows.setdefault(folder + slash + key, {})[extension] = content
    return rows


def indexed(path: Path, data: bytes) -> Samples:
    path.write_bytes(data)
    return zips.ZIP.index(path, URL, IndexOptions())


@pytest.mark.slow
@given(st.dictionaries(NAMES, CONTENTS, max_size=12), st.binary(max_size=30), st.binary(max_size=9))
def test_stored_members_are_ranges(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], comment: bytes, prefix: bytes
) -> None:
    """A sample's members belong together anywhere; a comment or data before may exist."""
    data = prefix + zipped(files, comment=comment)
    path = tmp_path_factory.mktemp("zips") / "a.zip"
    assert rows_of(indexed(path, data), data) == expected(files)
    assert copied(path) is None


@pytest.mark.slow
@given(st.dictionaries(NAMES, CONTENTS, max_size=12))
def test_compressed_members_become_a_tar(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    """The tar has the same samples, with names of any length, in pieces of a limited size."""
    path = tmp_path_factory.mktemp("zips") / "a.zip"
    path.write_bytes(zipped(files, zipfile.ZIP_DEFLATED))
    data = copied(path)
    if data is None:
        assert not files
        return
    assert rows_of(indexed(path, data), data) == expected(files)


def test_zip64_is_read(tmp_path: Path) -> None:
    """Members written as a stream, whose sizes are known behind them, are in zip64 form."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        with archive.open("a.txt", "w", force_zip64=True) as member:
            member.write(b"large")
        archive.writestr("folder/", b"")
    assert rows_of(indexed(tmp_path / "a.zip", data.getvalue()), data.getvalue()) == {
        "a": {"txt": b"large"}
    }


def test_zip64_record_may_have_numbers_that_fit_without_it(tmp_path: Path) -> None:
    """The record at the end then has the same numbers; other data may precede the zip."""
    data = zipped({"a.txt": b"x", "b.txt": b"y"})
    begin = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, end - begin, begin)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    for prefix in (b"", b"#!/bin/sh"):
        whole = prefix + data[:end] + record + locator + data[end:]
        assert rows_of(indexed(tmp_path / "a.zip", whole), whole) == {
            "a": {"txt": b"x"},
            "b": {"txt": b"y"},
        }


def test_locator_at_the_beginning_of_a_file_is_a_shard_error(tmp_path: Path) -> None:
    """The zip64 record has no room before it, although the signature of one is there."""
    short = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1)
    with pytest.raises(CorruptShardError, match="not where it should be"):
        indexed(tmp_path / "a.zip", b"PK\6\6" + locator + short)


@pytest.mark.slow
def test_more_members_than_a_short_record_counts(tmp_path: Path) -> None:
    """Above 65,534 members the directory's place is in a zip64 record."""
    data = zipped({f"{number}.t": b"" for number in range(65_536)})
    assert len(indexed(tmp_path / "a.zip", data)) == 65_536


def test_encrypted_member_is_an_error(tmp_path: Path) -> None:
    """The error says what to do: nobody gives the daemon a password."""
    data = bytearray(zipped({"a.txt": b"x"}))
    data[data.index(b"PK\1\2") + 8] |= 1
    with pytest.raises(UnsupportedShardError, match=r"'a\.txt' of the zip is encrypted") as caught:
        indexed(tmp_path / "a.zip", bytes(data))
    assert "without a password" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")]
)
def test_unusual_compression_is_an_error(tmp_path: Path, method: int, name: str) -> None:
    """The error names the compression."""
    with pytest.raises(UnsupportedShardError, match=f"compressed by {name}"):
        indexed(tmp_path / "a.zip", zipped({"a.txt": b"x"}, method))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_checksum_is_compared(tmp_path: Path, method: int) -> None:
    """One byte of a member that has changed is damage, and the member is named."""
    path = tmp_path / "a.zip"
    data = bytearray(zipped({"a.txt": bytes(range(256))}, method))
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptShardError, match=r"'a.txt'"):
        if copied(path) is None:
            indexed(path, bytes(data))


def test_bomb_is_stopped_at_the_size_that_the_zip_says(tmp_path: Path) -> None:
    """The size of a member is compared while it is inflated, not afterwards."""
    path = tmp_path / "a.zip"
    data = bytearray(zipped({"a.txt": bytes(10_000_000)}, zipfile.ZIP_DEFLATED))
    struct.pack_into("<L", data, data.index(b"PK\1\2") + 24, 1000)
    path.write_bytes(data)
    size_bytes = 0
    with pytest.raises(CorruptShardError, match="more than 1000 bytes"):
        for piece in zips.as_tar(path, URL):
            size_bytes += len(piece)
    assert size_bytes == 512  # its header in the tar


def test_members_that_share_bytes_are_an_error(tmp_path: Path) -> None:
    """A directory that names one member many times would make a small zip a large one."""
    data = zipped({"a.txt": b"x" * 100})
    start = data.index(b"PK\1\2")
    entry = data[start : data.index(b"PK\5\6")]
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, 2 * len(entry), start, 0)
    with pytest.raises(CorruptShardError, match="lies in another one"):
        indexed(tmp_path / "a.zip", data[:start] + 2 * entry + end)


def with_long_end(entries: int, size_bytes: int, start: int) -> bytes:
    """Return a zip of one member with a zip64 record that is wrong by what it adds."""
    data = zipped({"a.txt": b"x"})
    begin = data.index(b"PK\1\2")
    end = data.index(b"PK\5\6")
    place = [(1 + entries) % 2**64, (end - begin + size_bytes) % 2**64, (begin + start) % 2**64]
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, place[0], *place)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    short = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    return data[:end] + record + locator + short


@pytest.mark.parametrize(
    ("lie", "error", "match"),
    [
        ((1, 0, 0), CorruptShardError, "1 entries instead of 2"),
        ((-1, 0, 0), CorruptShardError, "more than the 0 entries"),
        ((2**63, 0, 0), UnsupportedShardError, "too much memory"),
        ((2_000_000, 0, 0), UnsupportedShardError, "at most 2,000,000 members"),
        ((0, 2**63, 0), CorruptShardError, "larger than the file"),
        ((0, 1, 0), CorruptShardError, "larger than the file"),
        ((0, -2, 0), CorruptShardError, "entry 0 of its directory is malformed"),
        ((0, 0, 2**63), CorruptShardError, "larger than the file"),
        ((0, 0, 1), CorruptShardError, "larger than the file"),
        ((0, 0, -2), CorruptShardError, "not at byte 2"),
    ],
)
def test_directory_that_is_not_where_it_is_said_to_be_is_an_error(
    tmp_path: Path, lie: tuple[int, int, int], error: type[ShardError], match: str
) -> None:
    """Nor as large, nor of as many entries: nothing is allocated by what a number says."""
    assert len(indexed(tmp_path / "a.zip", with_long_end(0, 0, 0))) == 1
    with pytest.raises(error, match=match):
        indexed(tmp_path / "a.zip", with_long_end(*lie))


@pytest.mark.parametrize(
    "name", ["../../etc/passwd.txt", "/a.txt", "a/../b.txt", "\\\\host\\a.txt", "é\u202e.txt"]
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_names_are_keys_and_no_paths(tmp_path: Path, name: str, method: int) -> None:
    """Nothing is written where a member's name says."""
    path = tmp_path / "a.zip"
    data = zipped({name: b"x" * 100}, method)
    path.write_bytes(data)
    plain = copied(path) or data
    assert rows_of(indexed(path, plain), plain) == expected({name: b"x" * 100})
    assert [each.name for each in tmp_path.iterdir()] == ["a.zip"]


def test_name_with_a_nul_is_an_error(tmp_path: Path) -> None:
    """Programs in C would take another name for it."""
    with pytest.raises(CorruptShardError, match="has a NUL"):
        indexed(tmp_path / "a.zip", zipped({"a.txt": b"x"}).replace(b"a.txt", b"a\0txt"))


@given(st.data())
def test_damage_is_a_shard_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Changed or missing bytes raise nothing else, and no offset is out of bounds."""
    whole = bytearray(
        zipped({"a.txt": b"abc", "a.jpg": b"x" * 300, "b.txt": b""}, zipfile.ZIP_DEFLATED)
    )
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    kept = whole[: data.draw(st.integers(len(whole) - 30, len(whole)))]
    path = tmp_path_factory.mktemp("zips") / "a.zip"
    path.write_bytes(kept)
    try:
        size_bytes = len(copied(path) or b"")
        samples = zips.ZIP.index(path, URL, IndexOptions())
    except ShardError:
        return
    assert size_bytes < 10_000
    assert max(samples.ends, default=0) <= len(kept)
