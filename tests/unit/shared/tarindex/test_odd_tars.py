"""Odd tars give the samples of webdataset 1.0.2; a test states each difference."""

import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import webdataset
from webdataset.handlers import ignore_and_continue

from shardcache.errors import (
    SampleError,
    ShardError,
    TornSampleError,
    TruncatedShardError,
)
from support.shards.odd_tars import (
    END,
    GNU,
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
from support.shards.tars import pack, special

A = member(b"a.jpg", b"1" * 700)
B = member(b"b.jpg", b"2" * 700)
B_CLS = member(b"b.cls", b"3" * 700)
OF_A = {"__key__": "a", "jpg": b"1" * 700}
OF_B = {"__key__": "b", "jpg": b"2" * 700}
LAST = {"__key__": "last", "txt": b"behind the oddity"}


LONG = "folder.d/" * 30 + "000001.jpg"
V7 = bytes(8)
FORMATS = {"USTAR": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT}


def packed(names: Iterable[str], format_: int = tarfile.PAX_FORMAT) -> bytes:
    """Pack a file under each name, its content its number, with `last` behind them."""
    numbered = [(name, b"%d" % number) for number, name in enumerate(names)]
    return pack([*numbered, ("last.txt", b"behind the oddity")], format=format_)


def in_formats(
    what: str, names: Iterable[str], formats: Iterable[str] = FORMATS
) -> dict[str, bytes]:
    return {f"{what}, {format_}": packed(names, FORMATS[format_]) for format_ in formats}


NAMES = {
    **in_formats(
        "names of 100 bytes and one more", ["a" * 96 + ".jpg", "b" * 97 + ".jpg"], ["GNU", "PAX"]
    ),
    **in_formats("long names", ["1.jpg", LONG, LONG + ".cls", "2.jpg"], ["GNU", "PAX"]),
    **in_formats(
        "a name that takes the prefix field", ["folder/" * 20 + "1.jpg", "folder/" * 20 + "1.cls"]
    ),
    **in_formats(
        "unicode names", ["é.jpg", "e\u0301.jpg", "日本/語.jpg", "日本/語.cls", "\U0001f600.jpg"]
    ),
    **in_formats("long unicode names", ["é" * 60 + ".jpg", "日" * 90 + ".jpg"], ["GNU", "PAX"]),
    **in_formats(
        "names in no encoding", ["\udcff.jpg", "\udcff.cls", "a.\udcc9", "\udced\udca0\udc80.jpg"]
    ),
    **in_formats("long names in no encoding", ["\udcff" * 120 + ".jpg"], ["GNU", "PAX"]),
    **in_formats(
        "dots in folders",
        ["v1.0/a.jpg", "v1.0/a.cls", "v1.0/b", "v1.0.d/c.x/d.tar.gz", "v1.0/.x/e.jpg"],
    ),
    **in_formats(
        "dots in keys", ["a.b.jpg", "a.c.jpg", "a..jpg", "a...", "b.", "c. jpg", "d.jpg.", "..jpg"]
    ),
    **in_formats(
        "dots in front",
        ["./a.jpg", "./a.cls", "../a.jpg", "a.cls", "/a.jpg", "//a.jpg", "./.a.jpg"],
    ),
    **in_formats(
        "hidden files", [".a", ".a.jpg", "d/.a", "d/.a.jpg", "d/.b.x", "d.x/.a.jpg", "d.x/e/.a.jpg"]
    ),
    **in_formats("no extension", ["README", "a.jpg", "d/README", "a.cls", "d/LICENSE"]),
    **in_formats(
        "upper case", ["a.JPG", "a.Cls", "A.jpg", "b.ÉTÉ", "b.İ", "b.ΟΔΟΣ", "b.\u212a", "b.ẞ"]
    ),
    **in_formats(
        "a very long extension", ["a.jpg", "a." + "x" * 90, "a." + "y.z" * 400], ["GNU", "PAX"]
    ),
    **in_formats(
        "line feeds",
        [
            "a\nb.jpg",
            "a\nb.cls",
            "a.j\npg",
            "\n.jpg",
            "d\n/a.jpg",
            "d/\n.jpg",
            "e.\n",
            "v1.0\n/a.x",
            "v1.0/\n/a.x",
        ],
    ),
    **in_formats("white space", [" .jpg", " .cls", "a .jpg", "a.jpg ", "\t.jpg", "\r\n.jpg"]),
    **in_formats(
        "metadata",
        ["__meta__", "a.jpg", "__meta__/a.cls", "a.cls", "__x__\n", "__/b.jpg", "____/b.jpg"],
    ),
    **in_formats(
        "nearly metadata",
        ["__index__.json", "d/__meta__", "d/__m__/a.b", "__a__b__/c.d", "__c.jpg", "_.x"],
    ),
    **in_formats(
        "dunder extensions that are free", ["a.__x__", "a.__local_path__", "a.__key", "__key__.jpg"]
    ),
}

ORDER = {
    "one key thrice": packed(["a.jpg", "b.jpg", "a.jpg", "b.jpg", "a.jpg"]),
    "one key thrice, members in another order": packed(
        ["a.jpg", "a.cls", "b.jpg", "a.cls", "a.jpg", "b.jpg", "a.jpg", "a.cls"]
    ),
    "one basename in two folders": packed(["x/a.jpg", "y/a.jpg", "a.jpg"]),
    "extensions in another order each": packed(
        ["a.jpg", "a.cls", "b.cls", "b.jpg", "c.txt", "c.cls", "c.jpg"]
    ),
    "a sample split by what is passed over": pack(
        [
            ("a.jpg", b"1"),
            (special("folder.d", tarfile.DIRTYPE), b""),
            ("a.cls", b"2"),
            (special("b.jpg", tarfile.SYMTYPE, "a.jpg"), b""),
            ("a.txt", b"3"),
            ("b", b"no extension"),
            ("__b__", b"metadata"),
            ("a.json", b"4"),
            ("last.txt", b""),
        ]
    ),
}

KINDS = {
    **{
        f"everything but files and hard links, {name}": pack(
            [
                (special("folder", tarfile.DIRTYPE), b""),
                ("folder/a.jpg", b"a" * 1000),
                (special("soft.jpg", tarfile.SYMTYPE, "folder/a.jpg"), b""),
                (
                    special(
                        "soft.png",
                        tarfile.SYMTYPE,
                        "target" * (10 if format_ == tarfile.USTAR_FORMAT else 50),
                    ),
                    b"",
                ),
                (special("null.dev", tarfile.CHRTYPE), b""),
                (special("disk.dev", tarfile.BLKTYPE), b""),
                (special("queue.fifo", tarfile.FIFOTYPE), b""),
                (special("folder/a.txt", tarfile.CONTTYPE), b"contiguous"),
                ("last.txt", b""),
            ],
            format=format_,
        )
        for name, format_ in FORMATS.items()
    },
    "empty members": pack(
        [("a.jpg", b""), ("a.cls", b""), ("b.jpg", b"1"), ("b.cls", b""), ("last.txt", b"")]
    ),
    "members that fill their blocks": pack(
        [("a.jpg", b"a" * 512), ("a.cls", b"b" * 1024), ("last.txt", b"c" * 511)]
    ),
    "a folder that gives a size": archive(
        header(b"folder/", 4096, b"5"), member(b"folder/a.jpg", b"1")
    ),
    "kinds that nobody knows": archive(
        member(b"volume.label", b"", b"V", magic=GNU),
        member(b"folder/", b"Ya.jpg\0\0", b"D", magic=GNU),
        member(b"going.on", b"m" * 700, b"M", magic=GNU),
        member(b"vendor.x", b"v" * 512, b"Z"),
        member(b"a.jpg", b"1"),
    ),
    "names that end in a slash": archive(
        member(b"old.jpg/", b"", b"\0"),
        member(b"new.jpg/", b"a file all the same", b"0"),
        records(("path", "pax.jpg/")),
        member(b"pax.jpg", b"1"),
        gnu_long(b"gnu.jpg/"),
        member(b"gnu.jpg", b"2"),
        gnu_long(b"d/" * 80 + b"a.jpg"),
        member(b"d/" * 50, b"", b"\0"),  # the name was cut where a folder ends
    ),
}

HEADERS = {
    "V7": archive(
        member(b"folder/", b"", b"\0", magic=V7),
        member(b"folder/a.jpg", b"1", b"\0", magic=V7),
        member(b"folder/a.cls", b"2", b"\0", magic=V7),
    ),
    "a full name field and a full prefix": archive(
        header(b"n" * 96 + b".jpg", 1, prefix=b"p" * 155) + padded(b"1"),
        header(b"a.jpg", 1, prefix=b"v1.0/d") + padded(b"2"),
        header(b"", 1, prefix=b"d.x") + padded(b"3"),
        member(b"", b"without any name"),
    ),
    "times in the prefix field, as GNU tar's incremental archives": archive(
        header(b"a.jpg", 1, magic=GNU, fields={345: b"14444444444\0", 357: b"14444444444\0"})
        + padded(b"1"),
        member(b"a.cls", b"2", magic=GNU),
    ),
    "base-256 numbers": archive(
        member(b"a.jpg", b"x" * 600, size=b"\x80" + (600).to_bytes(11, "big"), magic=GNU),
        header(
            b"a.cls", 1, magic=GNU, fields={108: b"\x80\0\0\0\x7f\xff\xff\xff", 136: b"\xff" * 12}
        )
        + padded(b"1"),
    ),
    "numbers as people have written them": archive(
        member(b"a.jpg", b"1", size=b"          1 "),
        member(b"b.jpg", b"1", size=b"000000000001"),
        member(b"c.jpg", b"1", size=b"1\0" + b"garbage!!!"),
        member(b"d.jpg", b"", size=b" " * 12),
        member(b"e.jpg", b"", size=bytes(12)),
        member(b"f.jpg", b"1", size=b"1 \0\0\0\0\0\0\0\0\0\0"),
    ),
    "a name with a NUL and more": archive(member(b"a.jpg\0.png", b"1"), member(b"a.cls", b"2")),
    "a long name of more bytes than its header gives": archive(
        member(b"././@LongLink", b"long" * 30 + b".jpg\0", b"L", magic=GNU, size=15)
        + member(b"a.jpg", b"1"),
    ),
    "global records": archive(
        records(("comment", "of no interest"), ("path", "global.jpg"), kind=b"g"),
        member(b"a.jpg", b"1"),
        records(("path", "own.jpg")),
        member(b"b.jpg", b"2"),
        gnu_long(b"gnu.jpg"),
        member(b"c.jpg", b"3"),
        records(("comment", "the path holds on"), kind=b"g"),
        member(b"c.cls", b"3"),
        records(("path", "later.jpg"), kind=b"g"),
        member(b"d.jpg", b"4"),
        records(("path", ""), kind=b"g"),
        records(("path", "last.txt")),
    ),
    "extended headers around each other": archive(
        records(("path", "outer.jpg")) + gnu_long(b"inner.jpg") + member(b"a.jpg", b"1"),
        gnu_long(b"outer.cls") + records(("path", "inner.cls")) + member(b"b.jpg", b"2"),
        records(("path", "first.jpg")) + records(("path", "second.jpg")) + member(b"c.jpg", b"3"),
        gnu_long(b"first.cls") + gnu_long(b"second.cls") + member(b"d.jpg", b"4"),
        gnu_long(b"target", b"K") + gnu_long(b"linked.jpg") + header(b"e.jpg", 0, b"2"),
        records(("path", "of a folder")) + header(b"folder", 0, b"5"),
        member(b"f.jpg", b"plain again"),
    ),
    "PAX records of every sort": archive(
        records(
            ("path", "size.jpg"),
            ("size", "600"),
            ("mtime", "1.5"),
            ("SCHILY.xattr.user.a", b"\xff\n="),
        ),
        member(b"x", b"x" * 600, size=0),
        records(("path", "first.jpg"), ("path", "second.jpg")) + member(b"x", b"2"),
        records(("hdrcharset", "BINARY"), ("path", b"\xff\xfe.jpg")) + member(b"x", b"3"),
        records(("path", b"\xff\xfe.cls")) + member(b"x", b"4"),
        records(("path", "nul\0.jpg")) + member(b"x", b"5"),
        records(("path", "")) + member(b"empty.jpg", b"6"),
        records(("path", "solaris.jpg"), kind=b"X") + member(b"x", b"7"),
        records() + member(b"none.jpg", b"8"),
    ),
}

ENDS = {
    "one block of zeros for an end": archive(end=bytes(512)),
    "filled up to a tape's record": archive(end=bytes(20 * 512)),
    "an end that is not whole blocks": archive(end=END + bytes(100)),
    "megabytes of zeros behind the end": archive(end=bytes((3 << 20) + 700)),
}

ODD_TARS: dict[str, bytes] = {**NAMES, **ORDER, **KINDS, **HEADERS, **ENDS}
"""By what is odd about each; all of them are sound."""

TORN_TARS: dict[str, tuple[bytes, str, int]] = {
    "keys out of order": (packed(["a.jpg", "b.jpg", "a.cls", "b.cls"]), "a", 5 * 512),
    "a member appended": (packed(["a.jpg", "a.cls", "b.jpg", "b.cls", "a.txt"]), "a", 9 * 512),
    "a member replaced": (packed(["a.jpg", "a.cls", "b.jpg", "b.cls", "a.cls"]), "a", 9 * 512),
    "one member more at the third time": (
        packed(["a.jpg", "b.jpg", "a.jpg", "b.jpg", "a.jpg", "a.cls"]),
        "a",
        9 * 512,
    ),
    "one basename in two folders": (packed(["x/a.jpg", "y/a.jpg", "x/a.cls"]), "x/a", 5 * 512),
    "hidden files of one folder": (packed(["d/.a", "d.x", "d/..x"]), "d/", 5 * 512),
}
"""Tars with members apart, by how they came there; the key and the first such offset."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shard.tar"


def bare(samples: list[list[tuple[str, object]]]) -> list[dict[str, object]]:
    return [{name: value for name, value in items if name != "__url__"} for items in samples]


@pytest.mark.parametrize("name", ODD_TARS)
def test_odd_tars_give_the_samples_that_webdataset_gives(path: Path, name: str) -> None:
    """Members and order agree by the index, by number and while arriving."""
    path.write_bytes(ODD_TARS[name])
    expected = by_webdataset(path)
    indexed = by_index(path)
    arriving = by_arrival(path)
    assert expected.error is indexed.error is arriving.error is None
    assert expected.keys[-1] == "last"
    assert indexed.samples == by_number(path) == expected.samples
    assert arriving.samples == expected.samples[:-1]


@pytest.mark.parametrize("second", ["b.jpg", "b.JPG", "b.__key__", "b.__KEY__", "b.__url__"])
def test_reader_raises_over_a_member_where_webdataset_does(path: Path, second: str) -> None:
    """A repeated or reserved extension is a typed error after the samples before it."""
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
def test_a_bad_sample_is_skipped_whole_where_webdataset_keeps_a_part(
    path: Path, second: str
) -> None:
    """An ambiguous second member is left out: webdataset gives the sample without it."""
    path.write_bytes(archive(A, B, member(second.encode(), b"again"), B_CLS))
    kept = by_webdataset(path, ignore_and_continue)
    assert bare(kept.samples) == [OF_A, OF_B | {"cls": b"3" * 700}, LAST]
    assert going_on(by_index, path) == [kept.samples[0], None, kept.samples[2]]


def test_a_cut_shard_is_skipped_whole_where_webdataset_gives_samples_without_their_members(
    path: Path,
) -> None:
    """webdataset, told to go on after a cut member, gives its sample without it."""
    path.write_bytes(A + B + B_CLS[:800])
    assert bare(by_webdataset(path, ignore_and_continue).samples) == [OF_A, OF_B]
    assert isinstance(by_index(path).error, TruncatedShardError)


@pytest.mark.parametrize("name", TORN_TARS)
def test_a_torn_sample_is_an_error_where_webdataset_gives_its_parts(path: Path, name: str) -> None:
    """The error names key and byte; `require_adjacent = false` gives webdataset's samples."""
    data, key, at = TORN_TARS[name]
    path.write_bytes(data)
    expected = by_webdataset(path)
    assert expected.keys.count(key) > 1
    assert by_lenient_index(path).samples == by_number(path) == expected.samples
    indexed = by_index(path)
    arriving = by_arrival(path)
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
    image = member(b"d/b.jpg", b"2" * 700)
    label = member(b"d/b.cls", b"3" * 700)
    path.write_bytes(archive(image, member(b"d/._b.cls", b"AppleDouble"), label))
    assert [sample["__key__"] for sample in bare(by_webdataset(path).samples)] == [
        "d/b",
        "d/",
        "d/b",
        "last",
    ]
    assert bare(by_index(path).samples) == [OF_B | {"__key__": "d/b", "cls": b"3" * 700}, LAST]
    assert bare(by_arrival(path).samples) == [OF_B | {"__key__": "d/b", "cls": b"3" * 700}]


# Errors where webdataset loses data in silence, or reads what shardcache does not: the tar,
# webdataset's samples, the error and a part of its text


# Read where webdataset does not:


def test_a_hard_link_is_read_where_webdataset_skips_it(path: Path) -> None:
    """Its sample lacks the member with webdataset; here it has the content of the linked file."""
    path.write_bytes(archive(A, header(b"b.jpg", 0, b"1", fields={157: b"a.jpg"}), B_CLS))
    expected = by_webdataset(path)
    assert bare(expected.samples) == [OF_A, {"__key__": "b", "cls": b"3" * 700}, LAST]
    found = by_index(path)
    assert bare(found.samples) == [OF_A, OF_A | {"__key__": "b", "cls": b"3" * 700}, LAST]
    assert found.error is None


def test_unneeded_fields_may_hold_anything_where_webdataset_stops_silently(path: Path) -> None:
    """An owner that is no number ends webdataset's shard; here all of it is given."""
    path.write_bytes(
        archive(A, header(b"b.jpg", 700, fields={108: b"nobody\0\0"}) + padded(b"2" * 700))
    )
    expected = by_webdataset(path)
    assert bare(expected.samples) == [OF_A]
    assert expected.error is None
    found = by_index(path)
    assert bare(found.samples) == [OF_A, OF_B, LAST]
    assert found.error is None


def test_global_records_alone_are_an_empty_shard_where_webdataset_raises(path: Path) -> None:
    """As for GNU tar: what is said of all members may be said of none."""
    path.write_bytes(records(("comment", "of no interest"), kind=b"g") + END)
    assert isinstance(by_webdataset(path).error, tarfile.ReadError)
    found = by_index(path)
    assert found.samples == []
    assert found.error is None


# webdataset leaves it to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_samples_name_no_file_where_webdataset_names_a_local_one(path: Path) -> None:
    """`__local_path__` is left out, since a cached file may go once it was read."""
    path.write_bytes(archive(A, B))
    url = f"file:{path}"
    expected = list(webdataset.WebDataset(url, shardshuffle=False))
    assert {sample.pop("__local_path__") for sample in expected} == {str(path)}
    assert [sample | {"__url__": url} for sample in map(dict, by_index(path).samples)] == expected
