"""A corpus of odd tars: whatever tar writers of forty years, or somebody's file names, may put into a shard.

Each is small, made here byte by byte where the standard library would not write it, and has the sample `last` behind
the oddity: whoever gives that one has found the way past it.
"""

import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from webdataset.handlers import reraise_exception
from webdataset.tariterators import group_by_keys, tar_file_expander

from shardcache.errors import ShardcacheError
from shardcache.shared.protocol import Arriving
from shardcache.tarindex.grouping import index_tar
from shardcache.tarindex.tables import write
from shardcache_client.reading.leased.shards import ArrivingShard, MappedShard, ShardPlace
from support.shards.tars import pack, special

END = bytes(1024)
LONG = "folder.d/" * 30 + "000001.jpg"
_USTAR = b"ustar\x0000"
_GNU = b"ustar  \0"
_V7 = bytes(8)
_FORMATS = {"USTAR": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "PAX": tarfile.PAX_FORMAT}


def header(
    name: bytes,
    size: int | bytes,
    kind: bytes = b"0",
    *,
    magic: bytes = _USTAR,
    prefix: bytes = b"",
    fields: Mapping[int, bytes] | None = None,
) -> bytes:
    """Return a header block with a right checksum. `size` as bytes is the field itself; `fields` is laid over last."""
    block = bytearray(512)
    size_field = b"%011o\0" % size if isinstance(size, int) else size
    parts = {0: name, 100: b"0000644\0", 108: b"0001750\0", 116: b"0001750\0", 124: size_field, 136: b"14444444444\0"}
    for at, value in {**parts, 156: kind, 257: magic, 345: prefix, **(fields or {})}.items():
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(
    name: bytes, data: bytes, kind: bytes = b"0", *, magic: bytes = _USTAR, size: int | bytes | None = None
) -> bytes:
    """Return a member; `size` is what its header says, where that is not the length of its data."""
    return header(name, len(data) if size is None else size, kind, magic=magic) + padded(data)


def records(*keywords: tuple[str, str | bytes], kind: bytes = b"x") -> bytes:
    """Return a PAX extended header, or with kind `g` a global one."""
    payload = b""
    for keyword, value in keywords:
        rest = b" %s=%s\n" % (keyword.encode(), value if isinstance(value, bytes) else value.encode())
        length = len(rest) + 1
        while len(b"%d" % length) + len(rest) != length:
            length += 1
        payload += b"%d" % length + rest
    return member(b"PaxHeaders/0", payload, kind)


def gnu_long(name: bytes, kind: bytes = b"L") -> bytes:
    """Return the header by which GNU tar gives the next member a long name."""
    return member(b"././@LongLink", name + b"\0", kind, magic=_GNU)


def archive(*parts: bytes, end: bytes = END) -> bytes:
    """Join parts of a tar, with the sample `last` and the end-of-archive blocks behind them."""
    return b"".join(parts) + LAST + end


LAST = member(b"last.txt", b"behind the oddity")


def packed(names: Iterable[str], format_: int = tarfile.PAX_FORMAT) -> bytes:
    """Pack a file under each name, its content its number, with `last` behind them."""
    numbered = [(name, b"%d" % number) for number, name in enumerate(names)]
    return pack([*numbered, ("last.txt", b"behind the oddity")], format=format_)


def _in_formats(what: str, names: Iterable[str], formats: Iterable[str] = _FORMATS) -> dict[str, bytes]:
    return {f"{what}, {format_}": packed(names, _FORMATS[format_]) for format_ in formats}


NAMES = {
    **_in_formats("names of 100 bytes and one more", ["a" * 96 + ".jpg", "b" * 97 + ".jpg"], ["GNU", "PAX"]),
    **_in_formats("long names", ["1.jpg", LONG, LONG + ".cls", "2.jpg"], ["GNU", "PAX"]),
    **_in_formats("a name that takes the prefix field", ["folder/" * 20 + "1.jpg", "folder/" * 20 + "1.cls"]),
    **_in_formats("unicode names", ["é.jpg", "e\u0301.jpg", "日本/語.jpg", "日本/語.cls", "\U0001f600.jpg"]),
    **_in_formats("long unicode names", ["é" * 60 + ".jpg", "日" * 90 + ".jpg"], ["GNU", "PAX"]),
    **_in_formats("names in no encoding", ["\udcff.jpg", "\udcff.cls", "a.\udcc9", "\udced\udca0\udc80.jpg"]),
    **_in_formats("long names in no encoding", ["\udcff" * 120 + ".jpg"], ["GNU", "PAX"]),
    **_in_formats("dots in folders", ["v1.0/a.jpg", "v1.0/a.cls", "v1.0/b", "v1.0.d/c.x/d.tar.gz", "v1.0/.x/e.jpg"]),
    **_in_formats("dots in keys", ["a.b.jpg", "a.c.jpg", "a..jpg", "a...", "b.", "c. jpg", "d.jpg.", "..jpg"]),
    **_in_formats("dots in front", ["./a.jpg", "./a.cls", "../a.jpg", "a.cls", "/a.jpg", "//a.jpg", "./.a.jpg"]),
    **_in_formats("hidden files", [".a", ".a.jpg", "d/.a", "d/.a.jpg", "d/.b.x", "d.x/.a.jpg", "d.x/e/.a.jpg"]),
    **_in_formats("no extension", ["README", "a.jpg", "d/README", "a.cls", "d/LICENSE"]),
    **_in_formats("upper case", ["a.JPG", "a.Cls", "A.jpg", "b.ÉTÉ", "b.İ", "b.ΟΔΟΣ", "b.\u212a", "b.ẞ"]),
    **_in_formats("a very long extension", ["a.jpg", "a." + "x" * 90, "a." + "y.z" * 400], ["GNU", "PAX"]),
    **_in_formats(
        "line feeds",
        ["a\nb.jpg", "a\nb.cls", "a.j\npg", "\n.jpg", "d\n/a.jpg", "d/\n.jpg", "e.\n", "v1.0\n/a.x", "v1.0/\n/a.x"],
    ),
    **_in_formats("white space", [" .jpg", " .cls", "a .jpg", "a.jpg ", "\t.jpg", "\r\n.jpg"]),
    **_in_formats("metadata", ["__meta__", "a.jpg", "__meta__/a.cls", "a.cls", "__x__\n", "__/b.jpg", "____/b.jpg"]),
    **_in_formats("nearly metadata", ["__index__.json", "d/__meta__", "d/__m__/a.b", "__a__b__/c.d", "__c.jpg", "_.x"]),
    **_in_formats("dunder extensions that are free", ["a.__x__", "a.__local_path__", "a.__key", "__key__.jpg"]),
}

ORDER = {
    "one key thrice": packed(["a.jpg", "b.jpg", "a.jpg", "b.jpg", "a.jpg"]),
    "one key thrice, members in another order": packed(
        ["a.jpg", "a.cls", "b.jpg", "a.cls", "a.jpg", "b.jpg", "a.jpg", "a.cls"]
    ),
    "one basename in two folders": packed(["x/a.jpg", "y/a.jpg", "a.jpg"]),
    "extensions in another order each": packed(["a.jpg", "a.cls", "b.cls", "b.jpg", "c.txt", "c.cls", "c.jpg"]),
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
                (special("soft.png", tarfile.SYMTYPE, "target" * (10 if format_ == tarfile.USTAR_FORMAT else 50)), b""),
                (special("null.dev", tarfile.CHRTYPE), b""),
                (special("disk.dev", tarfile.BLKTYPE), b""),
                (special("queue.fifo", tarfile.FIFOTYPE), b""),
                (special("folder/a.txt", tarfile.CONTTYPE), b"contiguous"),
                ("last.txt", b""),
            ],
            format=format_,
        )
        for name, format_ in _FORMATS.items()
    },
    "empty members": pack([("a.jpg", b""), ("a.cls", b""), ("b.jpg", b"1"), ("b.cls", b""), ("last.txt", b"")]),
    "members that fill their blocks": pack([("a.jpg", b"a" * 512), ("a.cls", b"b" * 1024), ("last.txt", b"c" * 511)]),
    "a folder that gives a size": archive(header(b"folder/", 4096, b"5"), member(b"folder/a.jpg", b"1")),
    "kinds that nobody knows": archive(
        member(b"volume.label", b"", b"V", magic=_GNU),
        member(b"folder/", b"Ya.jpg\0\0", b"D", magic=_GNU),
        member(b"going.on", b"m" * 700, b"M", magic=_GNU),
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
        member(b"folder/", b"", b"\0", magic=_V7),
        member(b"folder/a.jpg", b"1", b"\0", magic=_V7),
        member(b"folder/a.cls", b"2", b"\0", magic=_V7),
    ),
    "a full name field and a full prefix": archive(
        header(b"n" * 96 + b".jpg", 1, prefix=b"p" * 155) + padded(b"1"),
        header(b"a.jpg", 1, prefix=b"v1.0/d") + padded(b"2"),
        header(b"", 1, prefix=b"d.x") + padded(b"3"),
        member(b"", b"without any name"),
    ),
    "times in the prefix field, as GNU tar's incremental archives": archive(
        header(b"a.jpg", 1, magic=_GNU, fields={345: b"14444444444\0", 357: b"14444444444\0"}) + padded(b"1"),
        member(b"a.cls", b"2", magic=_GNU),
    ),
    "base-256 numbers": archive(
        member(b"a.jpg", b"x" * 600, size=b"\x80" + (600).to_bytes(11, "big"), magic=_GNU),
        header(b"a.cls", 1, magic=_GNU, fields={108: b"\x80\0\0\0\x7f\xff\xff\xff", 136: b"\xff" * 12}) + padded(b"1"),
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
        member(b"././@LongLink", b"long" * 30 + b".jpg\0", b"L", magic=_GNU, size=15) + member(b"a.jpg", b"1"),
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
        records(("path", "size.jpg"), ("size", "600"), ("mtime", "1.5"), ("SCHILY.xattr.user.a", b"\xff\n=")),
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
    "one member more at the third time": (packed(["a.jpg", "b.jpg", "a.jpg", "b.jpg", "a.jpg", "a.cls"]), "a", 9 * 512),
    "one basename in two folders": (packed(["x/a.jpg", "y/a.jpg", "x/a.cls"]), "x/a", 5 * 512),
    "hidden files of one folder": (packed(["d/.a", "d.x", "d/..x"]), "d/", 5 * 512),
}
"""Tars with members of one sample apart, by how they came there; the key, and the offset of the first member apart."""

TRAILING_DATA: dict[str, tuple[bytes, int]] = {
    "garbage": (archive(end=END + b"garbage" * 300), 2048),
    "a byte behind megabytes of zeros": (archive(end=bytes((3 << 20) + 700) + b"\1"), 1024 + (3 << 20) + 700),
    "a second tar": (archive() + archive(member(b"second.jpg", b"1")), 2048),
    "a second tar behind a single block of zeros": (archive(end=bytes(512)) + archive(), 1536),
    "a hole of 4 KiB over a sample": (
        archive(end=bytes(4096)) + archive(member(b"a.jpg", b"x" * 2000), member(b"b.jpg", b"1")),
        1024 + 4096,
    ),
}
"""Tars with data behind the block of zeros that ends them, by what that is, and the offset of its first byte. As far as
that block, each has the sample `last` alone."""

_MAP = [0, 4, 1 << 20, 4]  # offset and length of each piece that is no hole
_SIZE = (1 << 20) + 4
_A_CLS = member(b"a.cls", b"1")

SPARSE_TARS: dict[str, bytes] = {
    "old GNU": archive(
        header(
            b"a.bin",
            8,
            b"S",
            magic=_GNU,
            fields={
                345: b"14444444444\0",  # a time, where USTAR has the prefix
                386: b"".join(b"%011o\0" % number for number in _MAP),
                483: b"%011o\0" % _SIZE,
            },
        ),
        padded(b"datamore"),
        _A_CLS,
    ),
    "PAX 0.0": archive(
        records(
            ("GNU.sparse.size", str(_SIZE)),
            ("GNU.sparse.numblocks", "2"),
            *(("GNU.sparse." + ("numbytes" if at % 2 else "offset"), str(number)) for at, number in enumerate(_MAP)),
        ),
        member(b"a.bin", b"datamore"),
        _A_CLS,
    ),
    "PAX 0.1": archive(
        records(
            ("GNU.sparse.size", str(_SIZE)),
            ("GNU.sparse.name", "a.bin"),
            ("GNU.sparse.map", ",".join(map(str, _MAP))),
        ),
        member(b"GNUSparseFile.1/a.bin", b"datamore"),
        _A_CLS,
    ),
    "PAX 1.0": archive(
        records(
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.name", "a.bin"),
            ("GNU.sparse.realsize", str(_SIZE)),
        ),
        member(b"GNUSparseFile.1/a.bin", padded(b"2\n" + b"".join(b"%d\n" % number for number in _MAP)) + b"datamore"),
        _A_CLS,
    ),
}
"""The sample `a`, whose member `bin` is a hole between four bytes and four more, in each way that tars have for it."""


Row = tuple[str, bytes, bytes]  # name, type, content

_FOLDERS = ["", "", "", "./", "d/", "d.ir/", ".h/", "é/", "__meta__/"]
_KEYS = ["a", "a", "b", "A", "ab", "é", "\udcff", "_", "__index__", ""]
_EXTENSIONS = ["jpg", "jpg", "JPG", "cls", "a.b", "é", "É", "İ", "ΟΣ", "\udcff", "__x__", "__key__", "__URL__", "", "/"]

# Few characters and few parts, so that dots, folders, hidden files, dunders and equal keys meet often.
names = (
    st.builds("{}{}.{}".format, st.sampled_from(_FOLDERS), st.sampled_from(_KEYS), st.sampled_from(_EXTENSIONS))
    | st.text("ab._/é\nJ", min_size=1, max_size=12)
    | st.sampled_from(["__meta__", "__index__.json", "a.jpg", "a.cls", "b.jpg", "x" * 300])
    | st.sampled_from(["d/._a.jpg", "d/.DS_Store", "__MACOSX/a.jpg", "d/__MACOSX/a.cls", "__MACOSX.jpg"])
)
kinds = st.sampled_from([tarfile.REGTYPE] * 5 + [tarfile.AREGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE])
formats = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
members = st.lists(st.tuples(names, kinds, st.binary(max_size=600)), max_size=12)


def pack_rows(rows: list[Row], format_: int) -> bytes:
    """Pack random members; those whose names the format cannot hold are left out."""
    fits = [row for row in rows if format_ != tarfile.USTAR_FORMAT or len(row[0]) < 100]
    # A trailing slash makes a folder of an old-style file, and folders have no data.
    return pack(
        [(special(name, kind), b"" if name.endswith("/") else value) for name, kind, value in fits], format=format_
    )


def is_of_macos(row: Row) -> bool:
    """Return True for a row that shardcache leaves out, and webdataset does not."""
    *folders, file = row[0].rstrip("/").split("/")
    return file.startswith("._") or file == ".DS_Store" or "__MACOSX" in [*folders, file]


Items = list[tuple[str, Any]]


@dataclass(slots=True)
class Reading:
    """The samples that were given, as items, for their order counts; and the error that ended it, if one did."""

    samples: list[Items] = field(default_factory=list)
    error: Exception | None = None

    @property
    def keys(self) -> list[str]:
        return [str(dict(items)["__key__"]) for items in self.samples]


def by_webdataset(path: Path, handler: Callable[[Exception], bool] = reraise_exception) -> Reading:
    """Read by webdataset's own stages: what its `tarfile_samples` does with an opened file."""
    with open(path, "rb") as stream:
        files = tar_file_expander([{"url": str(path), "stream": stream}], handler=handler)
        return _read(group_by_keys(files, handler=handler))


def by_index(path: Path, start: int = 0, *, require_adjacent: bool = True) -> Reading:
    """Index the tar, write and open its sidecar, and read from sample number `start` on."""
    try:
        reader = _publish(path, require_adjacent)
    except ShardcacheError as exn:
        return Reading(error=exn)
    with closing(reader):
        return _read(reader.samples(start))


def by_lenient_index(path: Path, start: int = 0) -> Reading:
    """Read as `by_index` does, with each part of a torn sample as a sample."""
    return by_index(path, start, require_adjacent=False)


def by_number(path: Path) -> list[Items | None]:
    """Read each sample by its number, as a shuffled reader does, last first; None is in the place of a bad one.

    Parts of a torn sample are samples.
    """
    with closing(_publish(path, require_adjacent=False)) as reader:
        readings = [_read(map(reader.cutter(), [number])) for number in reversed(range(len(reader)))]
    return [None if reading.error else reading.samples[0] for reading in readings][::-1]


def by_arrival(path: Path, start: int = 0) -> Reading:
    """Read the tar while its bytes arrive, no more of them than are asked for; its last sample is left to the index."""
    stat = path.stat()

    def grant(ready_bytes: int) -> Arriving:
        return Arriving(
            type="arriving", id=0, lease=1, url=str(path), version="v1", path=str(path), inode=stat.st_ino,
            size_bytes=stat.st_size, ready_bytes=ready_bytes,
        )  # fmt: skip

    def more(beyond: int) -> Arriving | None:
        return grant(beyond + 1) if beyond < stat.st_size else None

    with closing(ArrivingShard(grant(0), more)) as shard:
        return _read(shard.samples(start))


def going_on(read: Callable[[Path, int], Reading], path: Path) -> list[Items | None]:
    """Read to the end, as with a handler that continues after each bad sample: None is in the place of one."""
    found: list[Items | None] = []
    while True:
        reading = read(path, len(found))
        found += reading.samples
        if reading.error is None:
            return found
        found.append(None)


def _publish(path: Path, require_adjacent: bool) -> MappedShard:
    sidecar = path.with_suffix(".idx")
    samples = index_tar(path, str(path), require_adjacent=require_adjacent)
    write(sidecar, {"size_bytes": path.stat().st_size}, samples)
    return MappedShard(ShardPlace(path, sidecar), str(path))


def _read(samples: Iterator[dict[str, Any]]) -> Reading:
    reading = Reading()
    try:
        for sample in samples:
            reading.samples.append(list(sample.items()))
    except Exception as exn:  # noqa: BLE001  webdataset raises what it likes; the tests say which they expect
        reading.error = exn
    return reading
