"""Odd tars give the samples that webdataset 1.0.2 gives; where shardcache differs, a test says how and why."""

import gzip
import tarfile
from pathlib import Path

import pytest
import webdataset
from webdataset.handlers import ignore_and_continue

from shardcache.errors import (
    CorruptShardError,
    NotATarError,
    SampleError,
    ShardError,
    TornSampleError,
    TrailingDataError,
    TruncatedShardError,
)
from support.shards.odd_tars import (
    END,
    ODD_TARS,
    SPARSE_TARS,
    TORN_TARS,
    TRAILING_DATA,
    archive,
    by_arrival,
    by_index,
    by_lenient_index,
    by_number,
    by_webdataset,
    gnu_long,
    going_on,
    header,
    member,
    padded,
    records,
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


@pytest.mark.parametrize("name", ODD_TARS)
def test_odd_tars_give_the_samples_that_webdataset_gives(path: Path, name: str) -> None:
    """Member for member and in its order, by the index, by number and while arriving; the oddity costs nothing else."""
    path.write_bytes(ODD_TARS[name])
    expected, indexed, arriving = by_webdataset(path), by_index(path), by_arrival(path)
    assert expected.error is indexed.error is arriving.error is None
    assert expected.keys[-1] == "last"
    assert indexed.samples == by_number(path) == expected.samples
    assert arriving.samples == expected.samples[:-1]


@pytest.mark.parametrize("second", ["b.jpg", "b.JPG", "b.__key__", "b.__KEY__", "b.__url__"])
def test_reader_raises_over_a_member_where_webdataset_does(path: Path, second: str) -> None:
    """A double extension, or one that a sample has of itself: the samples before it come, then a typed error."""
    path.write_bytes(archive(A, B, member(second.encode(), b"again"), B_CLS))
    expected = by_webdataset(path)
    assert isinstance(expected.error, ValueError)
    for found in (by_index(path), by_arrival(path)):
        assert found.samples == expected.samples
        assert isinstance(found.error, SampleError)
        assert "'b'" in found.error.message
        assert found.error.url == str(path)


NO_TARS = {
    "empty": b"",
    "shorter than a header": b"short",
    "an error page": b"<?xml version='1.0'?><Error>" + b" " * 1000,
    "a long name without a member": A + gnu_long(b"b.jpg") + END,
    "cut within a long name": A + gnu_long(b"b.jpg")[:600],
    "cut within a member": A + B[:800],
    "cut before a member's last block is full": A + B[: 512 + 701],
}


@pytest.mark.parametrize("name", NO_TARS)
def test_shard_that_ends_webdataset_is_refused(path: Path, name: str) -> None:
    """It raises when it comes there; here nothing of such a shard is published."""
    path.write_bytes(NO_TARS[name])
    assert isinstance(by_webdataset(path).error, tarfile.ReadError)
    found = by_index(path)
    assert found.samples == []
    assert isinstance(found.error, ShardError)


# Where shardcache differs on purpose. Handlers that go on:


@pytest.mark.parametrize("second", ["b.jpg", "b.__key__", "b.__url__"])
def test_a_bad_sample_is_skipped_whole_where_webdataset_keeps_a_part(path: Path, second: str) -> None:
    """An ambiguous second member is left out: webdataset gives the sample without it."""
    path.write_bytes(archive(A, B, member(second.encode(), b"again"), B_CLS))
    kept = by_webdataset(path, ignore_and_continue)
    assert bare(kept.samples) == [OF_A, OF_B | {"cls": b"3" * 700}, LAST]
    assert going_on(by_index, path) == [kept.samples[0], None, kept.samples[2]]


def test_a_cut_shard_is_skipped_whole_where_webdataset_gives_samples_without_their_members(path: Path) -> None:
    """Told to go on after a member that is cut short, webdataset gives its sample without it, as if it had none."""
    path.write_bytes(A + B + B_CLS[:800])
    assert bare(by_webdataset(path, ignore_and_continue).samples) == [OF_A, OF_B]
    assert isinstance(by_index(path).error, TruncatedShardError)


@pytest.mark.parametrize("name", TORN_TARS)
def test_a_torn_sample_is_an_error_where_webdataset_gives_its_parts(path: Path, name: str) -> None:
    """The error names the key and the first byte of a member apart; `require_adjacent = false` gives webdataset's."""
    data, key, at = TORN_TARS[name]
    path.write_bytes(data)
    expected = by_webdataset(path)
    assert expected.keys.count(key) > 1
    assert by_lenient_index(path).samples == by_number(path) == expected.samples
    indexed, arriving = by_index(path), by_arrival(path)
    assert indexed.samples == []
    assert arriving.samples == expected.samples[: len(arriving.samples)]
    for found in (indexed, arriving):
        assert isinstance(found.error, TornSampleError)
        assert f"the key {key!r} appears again" in found.error.message
        assert f"at byte {at}:" in found.error.message
        assert "tar --sort=name" in found.error.remedy
        assert found.error.url == str(path)


def test_members_of_macos_are_left_out_where_webdataset_takes_them_for_samples(path: Path) -> None:
    """It finds a sample of theirs between the members of one, which it thereby tears in two."""
    image, label = member(b"d/b.jpg", b"2" * 700), member(b"d/b.cls", b"3" * 700)
    path.write_bytes(archive(image, member(b"d/._b.cls", b"AppleDouble"), label))
    assert [sample["__key__"] for sample in bare(by_webdataset(path).samples)] == ["d/b", "d/", "d/b", "last"]
    assert bare(by_index(path).samples) == [OF_B | {"__key__": "d/b", "cls": b"3" * 700}, LAST]
    assert bare(by_arrival(path).samples) == [OF_B | {"__key__": "d/b", "cls": b"3" * 700}]


# Errors where webdataset loses data in silence, or reads what shardcache does not: the tar, webdataset's samples, the
# error and a part of its text

IN_SILENCE: dict[str, tuple[bytes, list[dict[str, object]], type[ShardError], str]] = {
    "cut between two members": (A + B, [OF_A, OF_B], TruncatedShardError, "without an end-of-archive block"),
    "cut within a header": (A + B + B_CLS[:100], [OF_A, OF_B], TruncatedShardError, "inside the tar header"),
    "one wrong byte": (archive(A, B, b"\1" + B_CLS[1:]), [OF_A, OF_B], CorruptShardError, "checksum"),
    "an extended header of more memory than the daemon has for it": (
        archive(A, records(("comment", b" " * (17 << 20))), B),
        [OF_A, OF_B, LAST],
        CorruptShardError,
        "an extended header claims",
    ),
    "gzip data under a plain name": (gzip.compress(archive(A, B)), [OF_A, OF_B, LAST], NotATarError, ".tar.gz"),
    **{name: (data, [LAST], TrailingDataError, "data follows") for name, (data, _) in TRAILING_DATA.items()},
}


@pytest.mark.parametrize("name", IN_SILENCE)
def test_tars_that_webdataset_reads_in_silence_are_errors(path: Path, name: str) -> None:
    """Where samples would be missing, or could not be served; a shard's name tells how it is fetched."""
    data, given, error, text = IN_SILENCE[name]
    path.write_bytes(data)
    expected = by_webdataset(path)
    assert (bare(expected.samples), expected.error) == (given, None)
    found = by_index(path).error
    assert isinstance(found, error)
    assert text in f"{found.message} {found.remedy}"


DAMAGED = {
    "a PAX record longer than its header": archive(A, member(b"x", b"99 path=c.jpg\n", b"x"), B),
    "a PAX size that is no number": archive(A, records(("size", "many")), B),
    "a PAX size for all members that is not theirs": archive(records(("size", "5"), kind=b"g"), A, B),
    "a size below zero": archive(A, member(b"b.jpg", b"", size=b"\xff" * 12)),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_header_that_makes_no_sense_is_an_error_where_webdataset_guesses(path: Path, name: str) -> None:
    """A name or a size that cannot be made out: webdataset gives other names, other bytes or fewer samples."""
    path.write_bytes(DAMAGED[name])
    expected = by_webdataset(path)
    assert expected.error is None
    assert bare(expected.samples) != [OF_A, OF_B, LAST]
    assert isinstance(by_index(path).error, CorruptShardError)


def test_a_member_named_bad_is_an_error_where_webdataset_drops_its_sample_in_silence(path: Path) -> None:
    """`__bad__` means to webdataset that a sample is not to be given, and any member can have that extension."""
    path.write_bytes(archive(A, B, member(b"b.__bad__", b"1")))
    expected = by_webdataset(path)
    assert (bare(expected.samples), expected.error) == ([OF_A, LAST], None)
    assert isinstance(by_index(path).error, SampleError)
    assert going_on(by_index, path) == [expected.samples[0], None, expected.samples[1]]


@pytest.mark.parametrize("name", SPARSE_TARS)
def test_a_sparse_member_is_an_error_where_webdataset_fills_its_holes(path: Path, name: str) -> None:
    """Its content lies nowhere in one piece; its sample is an error, the others are given."""
    path.write_bytes(SPARSE_TARS[name])
    expected = by_webdataset(path)
    assert bare(expected.samples)[0] == {"__key__": "a", "bin": b"data" + bytes((1 << 20) - 4) + b"more", "cls": b"1"}
    assert isinstance(by_index(path).error, SampleError)
    assert going_on(by_index, path) == [None, expected.samples[1]]
    assert going_on(by_arrival, path) == [None]


# Read where webdataset does not:


def test_a_hard_link_is_read_where_webdataset_skips_it(path: Path) -> None:
    """Its sample lacks the member with webdataset; here it has the content of the linked file."""
    path.write_bytes(archive(A, header(b"b.jpg", 0, b"1", fields={157: b"a.jpg"}), B_CLS))
    expected = by_webdataset(path)
    assert bare(expected.samples) == [OF_A, {"__key__": "b", "cls": b"3" * 700}, LAST]
    found = by_index(path)
    assert (bare(found.samples), found.error) == ([OF_A, OF_A | {"__key__": "b", "cls": b"3" * 700}, LAST], None)


def test_unneeded_fields_may_hold_anything_where_webdataset_stops_silently(path: Path) -> None:
    """An owner that is no number ends the shard for webdataset; names and sizes are in order, so all of it is given."""
    path.write_bytes(archive(A, header(b"b.jpg", 700, fields={108: b"nobody\0\0"}) + padded(b"2" * 700)))
    expected = by_webdataset(path)
    assert (bare(expected.samples), expected.error) == ([OF_A], None)
    found = by_index(path)
    assert (bare(found.samples), found.error) == ([OF_A, OF_B, LAST], None)


def test_global_records_alone_are_an_empty_shard_where_webdataset_raises(path: Path) -> None:
    """As for GNU tar: what is said of all members may be said of none."""
    path.write_bytes(records(("comment", "of no interest"), kind=b"g") + END)
    assert isinstance(by_webdataset(path).error, tarfile.ReadError)
    found = by_index(path)
    assert (found.samples, found.error) == ([], None)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # webdataset leaves it to the garbage collector
def test_samples_name_no_file_where_webdataset_names_a_local_one(path: Path) -> None:
    """`__local_path__` of webdataset's local shards is left out: a file of the cache may go once it was read."""
    path.write_bytes(archive(A, B))
    url = f"file:{path}"
    expected = list(webdataset.WebDataset(url, shardshuffle=False))
    assert {sample.pop("__local_path__") for sample in expected} == {str(path)}
    assert [sample | {"__url__": url} for sample in map(dict, by_index(path).samples)] == expected
