"""Tars that webdataset 1.0.2 reads in silence or gives up on: here, each is a typed error."""

import gzip
from pathlib import Path

import pytest

from shardcache.errors import (
    CorruptShardError,
    NotATarError,
    SampleError,
    ShardError,
    TrailingDataError,
    TruncatedShardError,
)
from support.shards.odd_tars import (
    SPARSE_FORMATS,
    TRAILING_DATA,
    archive,
    by_arrival,
    by_index,
    by_webdataset,
    going_on,
    member,
    records,
    sparse_tar,
)

A = member(b"a.jpg", b"1" * 700)


B = member(b"b.jpg", b"2" * 700)


B_CLS = member(b"b.cls", b"3" * 700)


OF_A = {"__key__": "a", "jpg": b"1" * 700}


OF_B = {"__key__": "b", "jpg": b"2" * 700}


LAST = {"__key__": "last", "txt": b"behind the oddity"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard.tar"


def bare(samples: list[list[tuple[str, object]]]) -> list[dict[str, object]]:
    return [{name: value for name, value in items if name != "__url__"} for items in samples]


IN_SILENCE: dict[str, tuple[bytes, list[dict[str, object]], type[ShardError], str]] = {
    "cut between two members": (
        A + B,
        [OF_A, OF_B],
        TruncatedShardError,
        "without an end-of-archive block",
    ),
    "cut within a header": (
        A + B + B_CLS[:100],
        [OF_A, OF_B],
        TruncatedShardError,
        "inside the tar header",
    ),
    "one wrong byte": (
        archive(A, B, b"\1" + B_CLS[1:]),
        [OF_A, OF_B],
        CorruptShardError,
        "checksum",
    ),
    "an extended header of more memory than the daemon has for it": (
        archive(A, records(("comment", b" " * (17 << 20))), B),
        [OF_A, OF_B, LAST],
        CorruptShardError,
        "an extended header claims",
    ),
    "gzip data under a plain name": (
        gzip.compress(archive(A, B)),
        [OF_A, OF_B, LAST],
        NotATarError,
        ".tar.gz",
    ),
    **{
        name: (data, [LAST], TrailingDataError, "data follows")
        for name, (data, _) in TRAILING_DATA.items()
    },
}


@pytest.mark.parametrize("name", IN_SILENCE)
def test_tars_that_webdataset_reads_in_silence_are_errors(path: Path, name: str) -> None:
    """Samples would be missing or impossible to serve; a name tells the way of fetching."""
    data, given, error, text = IN_SILENCE[name]
    path.write_bytes(data)
    expected = by_webdataset(path)
    assert bare(expected.samples) == given
    assert expected.error is None
    found = by_index(path).error
    assert isinstance(found, error)
    assert text in f"{found.message} {found.remedy}"


DAMAGED = {
    "a PAX record longer than its header": archive(A, member(b"x", b"99 path=c.jpg\n", b"x"), B),
    "a PAX size that is no number": archive(A, records(("size", "many")), B),
    "a PAX size for all members that is not theirs": archive(
        records(("size", "5"), kind=b"g"), A, B
    ),
    "a size below zero": archive(A, member(b"b.jpg", b"", size=b"\xff" * 12)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_header_that_makes_no_sense_is_an_error_where_webdataset_guesses(
    path: Path, name: str
) -> None:
    """webdataset gives other names, other bytes or fewer samples for a bad name or size."""
    path.write_bytes(DAMAGED[name])
    expected = by_webdataset(path)
    assert expected.error is None
    assert bare(expected.samples) != [OF_A, OF_B, LAST]
    assert isinstance(by_index(path).error, CorruptShardError)


def test_a_member_named_bad_is_an_error_where_webdataset_drops_its_sample_in_silence(
    path: Path,
) -> None:
    """webdataset does not give a sample with `__bad__`, which any member may be called."""
    path.write_bytes(archive(A, B, member(b"b.__bad__", b"1")))
    expected = by_webdataset(path)
    assert bare(expected.samples) == [OF_A, LAST]
    assert expected.error is None
    assert isinstance(by_index(path).error, SampleError)
    assert going_on(by_index, path) == [expected.samples[0], None, expected.samples[1]]


@pytest.mark.parametrize("name", SPARSE_FORMATS)
def test_a_sparse_member_is_an_error_where_webdataset_fills_its_holes(
    path: Path, name: str
) -> None:
    """Its content lies nowhere in one piece; its sample is an error, the others are given."""
    path.write_bytes(sparse_tar(path.parent, name))
    expected = by_webdataset(path)
    assert bare(expected.samples)[0] == {
        "__key__": "a",
        "bin": b"data" + bytes((1 << 20) - 4) + b"more",
        "cls": b"1",
    }
    assert isinstance(by_index(path).error, SampleError)
    assert going_on(by_index, path) == [None, expected.samples[1]]
    assert going_on(by_arrival, path) == [None]
