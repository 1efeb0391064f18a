"""The sidecar gives back what was written, and nothing else whatever is done to it."""

import os
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.errors import CorruptShardError
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.tables import Fault, Samples, TarIndex, key_of, read_header, write
from shardcache.store.indexing.indexer import IndexRequest, index_shard
from support.shards.tars import make_tar, pack, random_samples

URL = "s3://bucket/train-000000.tar"


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    """A shard of three samples, the second of them bad."""
    path = tmp_path / "shard.tar"
    path.write_bytes(
        pack(
            [
                ("a.jpg", b"1"),
                ("b.jpg", b"2"),
                ("b.jpg", b"3"),
                ("c/d.JPG", b"4"),
                ("c/d.cls", b"5"),
            ]
        )
    )
    return path


@pytest.fixture
def sidecar(tar: Path) -> Path:
    path = tar.with_suffix(".idx")
    write(path, {"url": URL, "size_bytes": tar.stat().st_size}, index_tar(tar, URL))
    return path


def test_an_index_comes_back_as_it_was_made(tar: Path, sidecar: Path) -> None:
    """Every table, the header and the faults survive writing and opening."""
    made = index_tar(tar, URL)
    opened = TarIndex.open(sidecar)
    assert opened.header == read_header(sidecar) == {"url": URL, "size_bytes": tar.stat().st_size}
    for table in ("starts", "ends", "extension_ids", "member_ends", "key_ends"):
        assert list(getattr(opened, table)) == list(getattr(made, table))
    assert opened.extensions == ["jpg", "cls"]
    assert opened.faults == {1: (Fault.DUPLICATE, 0)}
    assert [key_of(opened, number) for number in range(len(opened))] == ["a", "b", "c/d"]


def test_any_changed_byte_is_noticed(sidecar: Path) -> None:
    """Whichever bit of a sidecar flips, opening it fails."""
    data = sidecar.read_bytes()
    for at in range(len(data)):
        sidecar.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CorruptShardError, match="sidecar"):
            TarIndex.open(sidecar)


def test_any_other_length_is_noticed(sidecar: Path) -> None:
    """A sidecar that was cut or grew is refused, also by who reads its header alone."""
    data = sidecar.read_bytes()
    sidecar.write_bytes(data + b"\0")
    for size_bytes in range(len(data), -1, -1):
        with pytest.raises(CorruptShardError):
            read_header(sidecar)
        with pytest.raises(CorruptShardError):
            TarIndex.open(sidecar)
        os.truncate(sidecar, size_bytes - 1 if size_bytes else 0)


@pytest.mark.parametrize(
    ("table", "at", "value"),
    [
        pytest.param("ends", 1, 1 << 40, id="member beyond the tar"),
        pytest.param("starts", 1, 1 << 30, id="member that ends before it starts"),
        pytest.param("extension_ids", 0, 2, id="unknown extension"),
        pytest.param("member_ends", 2, 3, id="member of no sample"),
        pytest.param("member_ends", 0, 3, id="samples that overlap"),
        pytest.param("key_ends", 0, 4, id="keys that overlap"),
        pytest.param("key_ends", 2, 6, id="key beyond the keys"),
        pytest.param("faults", 3, (Fault.DUPLICATE, 0), id="fault of no sample"),
    ],
)
def test_numbers_that_lead_astray_are_refused(
    tar: Path, sidecar: Path, table: str, at: int, value: object
) -> None:
    """A forged sidecar with right checksums leads no reader outside the tar or tables."""
    samples = index_tar(tar, URL)
    getattr(samples, table)[at] = value
    write(sidecar, {"size_bytes": tar.stat().st_size}, samples)
    with pytest.raises(CorruptShardError, match="contradict"):
        TarIndex.open(sidecar)


@pytest.mark.parametrize("count", [8192, 8193, 20_000])
@pytest.mark.parametrize("start", [1, 1 << 63, (1 << 64) - 1])
def test_one_bad_number_among_thousands_is_refused(tmp_path: Path, count: int, start: int) -> None:
    """Numbers are compared by the thousand, and equal ones are as good as smaller ones."""
    sidecar = tmp_path / "shard.idx"

    def opened(starts: "array[int]") -> int:
        empty = array("Q", bytes(8 * count))
        samples = Samples(starts, empty, array("I", bytes(4 * count)), extensions=["jpg"])
        samples.keys = bytearray(1)
        samples.key_ends = array("Q", [1])
        samples.member_ends = array("Q", [count])
        write(sidecar, {"size_bytes": 0}, samples)
        return len(TarIndex.open(sidecar))

    assert opened(array("Q", bytes(8 * count))) == 1
    for place in (0, 8191, count - 1):
        starts = array("Q", bytes(8 * count))
        starts[place] = start
        with pytest.raises(CorruptShardError, match="contradict"):
            opened(starts)


@pytest.mark.parametrize("count", [8192, 8193, 20_000])
@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("ends", 1001),
        ("ends", (1 << 64) - 1),
        ("extension_ids", 2),
        ("extension_ids", (1 << 32) - 1),
    ],
)
def test_one_number_beyond_the_limit_among_thousands_is_refused(
    tmp_path: Path, count: int, table: str, value: int
) -> None:
    """Wherever it is; numbers at the limit are not beyond it."""
    sidecar = tmp_path / "shard.idx"
    for place in (None, 0, 8191, count - 1):
        samples = Samples(
            starts=array("Q", [1000]) * count,
            ends=array("Q", [1000]) * count,
            extension_ids=array("I", [1]) * count,
            member_ends=array("Q", [count]),
            keys=bytearray(1),
            key_ends=array("Q", [1]),
            extensions=["jpg", "txt"],
        )
        if place is not None:
            getattr(samples, table)[place] = value
        write(sidecar, {"size_bytes": 1000}, samples)
        if place is None:
            assert len(TarIndex.open(sidecar)) == 1
            continue
        with pytest.raises(CorruptShardError, match="contradict"):
            TarIndex.open(sidecar)


@pytest.mark.parametrize("header", [{}, {"size_bytes": "many"}])
def test_a_header_without_the_tars_size_is_refused(
    sidecar: Path, header: dict[str, object]
) -> None:
    """Spans can be checked only against a size."""
    write(sidecar, header, Samples())
    with pytest.raises(CorruptShardError, match="size of the tar"):
        read_header(sidecar)


def test_offsets_of_any_size_fit(sidecar: Path) -> None:
    """Offsets past 4 GiB, keys and extensions in no encoding come back as they were."""
    samples = Samples(
        starts=array("Q", [1 << 40]),
        ends=array("Q", [(1 << 40) + 7]),
        extension_ids=array("I", [0]),
        member_ends=array("Q", [1]),
        keys=bytearray(b"\xffkey"),
        key_ends=array("Q", [4]),
        extensions=["\udcff"],
    )
    write(sidecar, {"size_bytes": 1 << 41}, samples)
    index = TarIndex.open(sidecar)
    assert index.starts[0] == 1 << 40
    assert index.ends[0] == (1 << 40) + 7
    assert key_of(index, 0) == "\udcffkey"
    assert index.extensions == ["\udcff"]


def test_a_sidecar_larger_than_allowed_is_not_written(tmp_path: Path) -> None:
    """The worker says how large it would be instead, and exactly that much is enough."""
    tar = tmp_path / "shard.tar"
    sidecar = tmp_path / "shard.idx"
    tar.write_bytes(make_tar(random_samples(5)))
    request = IndexRequest(
        str(tar), str(sidecar), {"size_bytes": tar.stat().st_size}, URL, True, 100
    )
    refused = index_shard(request)
    assert not refused.was_written
    assert not sidecar.exists()
    assert index_shard(replace(request, allowed_bytes=refused.sidecar_bytes)).was_written
    assert sidecar.stat().st_size == refused.sidecar_bytes
