"""The walk over a tar's headers, against tarfile, and what it says of damaged files."""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.errors import (
    CorruptShardError,
    NotATarError,
    ShardError,
    TrailingDataError,
    TruncatedShardError,
)
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.members import Tar
from support.shards.odd_tars import TRAILING_DATA, header, padded
from support.shards.tars import Sample, make_tar, pack

URL = "s3://bucket/train-000000.tar"
SMALL: list[Sample] = [
    {"__key__": f"{number}", "jpg": b"x" * 700, "cls": b"1"} for number in range(2)
]
LONG_NAME = "folder/" * 40 + "000001.jpg"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard.tar"


def spans(path: Path) -> list[tuple[str, int, int]]:
    """Name, first byte and end of each regular file, as the index walks them."""
    with open(path, "rb") as file:

        def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
            return os.pread(file.fileno(), max_bytes, at)

        tar = Tar(read, path.stat().st_size, URL, require_end=True)
        return [
            (name.decode("utf-8", "surrogateescape"), start, end) for name, start, end, _ in tar
        ]


def boundaries(data: bytes) -> list[int]:
    """Offsets where a member ends and the next header, or the end-of-archive block, begins."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [info.offset_data + (info.size + 511) // 512 * 512 for info in tar]


def cuts(path: Path, data: bytes, stop: int) -> Iterator[int]:
    """Leave the file with each number of bytes below `stop`, longest first."""
    path.write_bytes(data[:stop])
    for size_bytes in reversed(range(stop)):
        os.truncate(path, size_bytes)
        yield size_bytes


@pytest.mark.parametrize("format_", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_and_offsets_beyond_8_gib(path: Path, format_: Literal[1, 2]) -> None:
    """Base-256 and PAX sizes: a 9 GiB member is passed over, and the next one found."""
    huge = tarfile.TarInfo("1.bin")
    huge.size = 9 << 30
    head = huge.tobuf(format_)
    tail = pack([("2.bin", b"behind")], format=format_)
    with open(path, "wb") as file:
        file.write(head)
        file.seek(len(head) + huge.size)
        file.write(tail)
    with tarfile.open(path, errorlevel=2) as tar:
        assert spans(path) == [
            (info.name, info.offset_data, info.offset_data + info.size) for info in tar
        ]
    assert [end - start for _, start, end in spans(path)] == [9 << 30, 6]


def test_a_checksum_over_signed_bytes_is_right_too(path: Path) -> None:
    """Some old tars summed signed characters; tarfile accepts that, and so does the index."""
    data = bytearray(pack([("é.jpg", b"1")]))
    signed = (
        sum(byte - 256 if byte >= 128 else byte for byte in (*data[:148], *data[156:512])) + 8 * 32
    )
    data[148:156] = b"%06o\0 " % signed
    path.write_bytes(data)
    assert [name for name, _, _ in spans(path)] == ["é.jpg"]


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
def test_sparse_members_are_faults_and_disturb_no_other(tmp_path: Path, path: Path) -> None:
    """A sparse member's bytes are not in one piece: its sample says so, others are whole."""
    (tmp_path / "1.jpg").write_bytes(b"before")
    with open(tmp_path / "2.bin", "wb") as file:
        for piece in range(40):  # more than the header's own table holds
            file.seek(piece << 17)
            file.write(b"data")
    (tmp_path / "3.jpg").write_bytes(b"behind")
    names = ["1.jpg", "2.bin", "3.jpg"]
    subprocess.run(
        ["tar", "--sparse", "--format=gnu", "-C", tmp_path, "-cf", path, *names], check=True
    )
    samples = index_tar(path, URL)
    assert path.stat().st_size < 1 << 20, "tar stored it whole: this filesystem has no holes"
    assert len(samples) == 3
    assert list(samples.faults) == [1]
    data = path.read_bytes()
    assert [data[start:end] for start, end in zip(samples.starts, samples.ends, strict=True)] == [
        b"before",
        b"behind",
    ]


@pytest.mark.slow
def test_every_cut_is_noticed(path: Path) -> None:
    """Cut at any byte, a tar is refused with a typed error that names its url.

    `require_end=False` forgives a missing end-of-archive block, hence cuts between two members, and
    nothing else.
    """
    data = make_tar(SMALL)
    passed = []
    for size_bytes in cuts(path, data, boundaries(data)[-1] + 512):
        with pytest.raises((TruncatedShardError, NotATarError)) as caught:
            index_tar(path, URL)
        assert caught.value.url == URL
        assert isinstance(caught.value, TruncatedShardError) or 0 < size_bytes < 512
        with suppress(ShardError):
            passed.append((size_bytes, len(index_tar(path, URL, require_end=False).starts)))
    assert passed == [(end, number) for number, end in enumerate(boundaries(data), 1)][::-1]


def test_a_cut_at_a_member_boundary_says_how_it_is_judged(path: Path) -> None:
    """The message tells a missing end from a torn member, and the remedy names the switch."""
    data = make_tar(SMALL)
    path.write_bytes(data[: boundaries(data)[2]])
    with pytest.raises(TruncatedShardError, match="without an end-of-archive block") as caught:
        index_tar(path, URL)
    assert f"byte {boundaries(data)[2]}" in caught.value.message
    assert "require_end" in caught.value.remedy
    path.write_bytes(data[:600])
    with pytest.raises(TruncatedShardError, match=r"ends at byte 600, inside the member '0\.jpg'"):
        index_tar(path, URL)


@pytest.mark.parametrize("name", TRAILING_DATA)
def test_data_after_the_end_are_refused(path: Path, name: str) -> None:
    """Anything but zeros behind the end may be samples; the error names its first byte."""
    data, offset = TRAILING_DATA[name]
    path.write_bytes(data)
    with pytest.raises(TrailingDataError, match=f"data follows at byte {offset}, ") as caught:
        index_tar(path, URL)
    assert caught.value.url == URL
    assert "ignore_trailing_data" in caught.value.remedy
    samples = index_tar(path, URL, ignore_trailing_data=True)
    assert [
        path.read_bytes()[slice(*span)] for span in zip(samples.starts, samples.ends, strict=True)
    ] == [b"behind the oddity"]


def test_zeros_anywhere_cost_no_sample_in_silence(path: Path) -> None:
    """A 4 KiB hole at any block is an error, or keeps all samples with zeros in some."""
    data = make_tar([{"__key__": f"{number}", "bin": b"x" * 3000} for number in range(6)])
    end = boundaries(data)[-1]
    for at in range(0, end, 512):
        path.write_bytes(data[:at] + bytes(min(4096, end - at)) + data[at + 4096 :])
        try:
            samples = len(index_tar(path, URL))
        except ShardError:
            continue
        assert samples == 6 or at + 4096 >= end, f"{samples} of 6 samples with a hole at byte {at}"


LONG_NAMED = [("1.jpg", b"1" * 600), (LONG_NAME, b"2"), ("é.cls", b"3")]
WHOLE = [
    make_tar(SMALL),
    pack(LONG_NAMED, format=tarfile.GNU_FORMAT),
    pack(LONG_NAMED, format=tarfile.PAX_FORMAT),
]


@settings(deadline=None)
@given(
    whole=st.sampled_from(WHOLE),
    damage=st.lists(st.tuples(st.integers(0, 6143), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damage_anywhere_never_leads_astray(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, damage: list[tuple[int, int]]
) -> None:
    """Any changed bytes end in a typed error or in spans that lie within the file."""
    data = bytearray(whole)
    for at, byte in damage:
        data[at] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    path.write_bytes(data)
    try:
        samples = index_tar(path, URL)
    except ShardError:
        return
    assert all(
        512 <= start <= end <= len(data)
        for start, end in zip(samples.starts, samples.ends, strict=True)
    )


def endless(head: bytes, again: Callable[[int], bytes], times: int) -> Tar:
    """Return a tar made as it is read: a beginning, `times` pieces of one size, the end."""
    piece_bytes = len(again(0))
    size_bytes = len(head) + times * piece_bytes + 1024

    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        data = bytearray(head[at : at + max_bytes])
        while len(data) < min_bytes and at + len(data) < size_bytes:
            number, skipped = divmod(at + len(data) - len(head), piece_bytes)
            data += again(number)[skipped:] if number < times else bytes(1024)
        return bytes(data)

    return Tar(read, size_bytes, URL, require_end=True)


@pytest.mark.slow
def test_unneeded_records_are_not_kept() -> None:
    """200,000 records in a header cost the next 100,000 members nothing."""
    records = b"".join(b"19 comment%06d=x\n" % number for number in range(200_000))
    head = header(b"pax_global_header", len(records), b"g") + padded(records)
    tar = endless(head, lambda number: header(b"%06d.txt" % number, 0, b"0"), 100_000)
    assert sum(1 for _ in tar) == 100_000


@pytest.mark.slow
def test_extended_headers_without_end_are_read_once_each() -> None:
    """150,000 of them before one member, each with another keyword: the walk stays linear."""

    def extended(number: int) -> bytes:
        record = b"19 comment%06d=x\n" % number
        return header(b"x", len(record), b"x") + padded(record)

    with pytest.raises(
        TruncatedShardError, match="between a member's extended header and the member"
    ):
        list(endless(b"", extended, 150_000))


@pytest.mark.parametrize(("size_bytes", "refused"), [(4096, False), (4097, True)])
def test_a_name_for_all_members_is_short(size_bytes: int, refused: bool) -> None:
    """A global header's long name would make gigabytes of index out of a small tar."""
    name = b"a" * (size_bytes - 4) + b".jpg"
    record = b" path=" + name + b"\n"
    record = b"%d%s" % (len(record) + 4, record)
    data = (
        header(b"g", len(record), b"g") + padded(record) + header(b"b.jpg", 0, b"0") + bytes(1024)
    )
    tar = Tar(lambda at, least, most: data[at : at + most], len(data), URL, require_end=True)
    if refused:
        with pytest.raises(CorruptShardError, match="a global header gives all members"):
            list(tar)
    else:
        assert [found[0] for found in tar] == [name]


def test_an_error_about_a_long_name_is_short() -> None:
    """Nobody reads a message of megabytes, and it would go through every log."""
    name = b"x" * 100_000
    data = header(b"long", len(name), b"L") + padded(name) + header(b"cut.jpg", 10_000, b"0")
    tar = Tar(lambda at, least, most: data[at : at + most], len(data), URL, require_end=True)
    with pytest.raises(TruncatedShardError) as caught:
        list(tar)
    assert len(str(caught.value)) < 1000
