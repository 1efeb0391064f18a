"""Odd tars, some made byte by byte, and the ways to read them.

Most have the sample `last` behind the oddity: a reader that gives it has found the way past the
oddity.
"""

import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from webdataset.handlers import reraise_exception
from webdataset.tariterators import group_by_keys, tar_file_expander

from shardcache.errors import ShardcacheError
from shardcache.shared.protocol import Arriving
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.tables import write
from shardcache_client.reading.leased.shards import ArrivingShard, MappedShard, ShardPlace
from support.shards.tars import pack, special

END = bytes(1024)
_USTAR = b"ustar\x0000"
GNU = b"ustar  \0"


def header(
    name: bytes,
    size: int | bytes,
    kind: bytes = b"0",
    *,
    magic: bytes = _USTAR,
    prefix: bytes = b"",
    fields: Mapping[int, bytes] | None = None,
) -> bytes:
    """Return a header with a right checksum. Bytes as `size` are the field; `fields` come last."""
    block = bytearray(512)
    size_field = b"%011o\0" % size if isinstance(size, int) else size
    parts = {
        0: name,
        100: b"0000644\0",
        108: b"0001750\0",
        116: b"0001750\0",
        124: size_field,
        136: b"14444444444\0",
    }
    for at, value in {**parts, 156: kind, 257: magic, 345: prefix, **(fields or {})}.items():
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(
    name: bytes,
    data: bytes,
    kind: bytes = b"0",
    *,
    magic: bytes = _USTAR,
    size: int | bytes | None = None,
) -> bytes:
    """Return a member; `size` is what its header says, where that is not the length of its data."""
    return header(name, len(data) if size is None else size, kind, magic=magic) + padded(data)


def records(*keywords: tuple[str, str | bytes], kind: bytes = b"x") -> bytes:
    """Return a PAX extended header, or with kind `g` a global one."""
    payload = b""
    for keyword, value in keywords:
        rest = b" %s=%s\n" % (
            keyword.encode(),
            value if isinstance(value, bytes) else value.encode(),
        )
        length = len(rest) + 1
        while len(b"%d" % length) + len(rest) != length:
            length += 1
        payload += b"%d" % length + rest
    return member(b"PaxHeaders/0", payload, kind)


def gnu_long(name: bytes, kind: bytes = b"L") -> bytes:
    """Return the header by which GNU tar gives the next member a long name."""
    return member(b"././@LongLink", name + b"\0", kind, magic=GNU)


def archive(*parts: bytes, end: bytes = END) -> bytes:
    """Join parts of a tar, with the sample `last` and the end-of-archive blocks behind them."""
    return b"".join(parts) + LAST + end


LAST = member(b"last.txt", b"behind the oddity")


TRAILING_DATA: dict[str, tuple[bytes, int]] = {
    "garbage": (archive(end=END + b"garbage" * 300), 2048),
    "a byte behind megabytes of zeros": (
        archive(end=bytes((3 << 20) + 700) + b"\1"),
        1024 + (3 << 20) + 700,
    ),
    "a second tar": (archive() + archive(member(b"second.jpg", b"1")), 2048),
    "a second tar behind a single block of zeros": (archive(end=bytes(512)) + archive(), 1536),
    "a hole of 4 KiB over a sample": (
        archive(end=bytes(4096)) + archive(member(b"a.jpg", b"x" * 2000), member(b"b.jpg", b"1")),
        1024 + 4096,
    ),
}
"""Tars with data behind their end, by its kind and offset; before it is just `last`."""

SPARSE_FORMATS = {
    "old GNU": ["--format=gnu"],
    "PAX 0.0": ["--format=posix", "--sparse-version=0.0"],
    "PAX 0.1": ["--format=posix", "--sparse-version=0.1"],
    "PAX 1.0": ["--format=posix", "--sparse-version=1.0"],
}
"""Options of GNU tar for each way that tars have of holding a sparse file."""


def sparse_tar(folder: Path, format_: str) -> bytes:
    """Return GNU tar's archive of `last` and a sample `a` with a hole in its `bin`."""
    with (folder / "a.bin").open("wb") as file:
        file.write(b"data")
        file.seek(1 << 20)
        file.write(b"more")
    (folder / "a.cls").write_bytes(b"1")
    (folder / "last.txt").write_bytes(b"behind the oddity")
    command = [
        "tar",
        "--sparse",
        *SPARSE_FORMATS[format_],
        "--blocking-factor=1",
        f"--directory={folder}",
    ]
    return subprocess.run(
        [*command, "-c", "a.bin", "a.cls", "last.txt"], check=True, capture_output=True
    ).stdout


Row = tuple[str, bytes, bytes]  # name, type, content

_FOLDERS = ["", "", "", "./", "d/", "d.ir/", ".h/", "é/", "__meta__/"]
_KEYS = ["a", "a", "b", "A", "ab", "é", "\udcff", "_", "__index__", ""]
_EXTENSIONS = [
    "jpg",
    "jpg",
    "JPG",
    "cls",
    "a.b",
    "é",
    "É",
    "İ",
    "ΟΣ",
    "\udcff",
    "__x__",
    "__key__",
    "__URL__",
    "",
    "/",
]

# Few characters and few parts, so that dots, folders, hidden files, dunders and equal keys meet
# often.
names = (
    st.builds(
        "{}{}.{}".format,
        st.sampled_from(_FOLDERS),
        st.sampled_from(_KEYS),
        st.sampled_from(_EXTENSIONS),
    )
    | st.text("ab._/é\nJ", min_size=1, max_size=12)
    | st.sampled_from(["__meta__", "__index__.json", "a.jpg", "a.cls", "b.jpg", "x" * 300])
    | st.sampled_from(
        ["d/._a.jpg", "d/.DS_Store", "__MACOSX/a.jpg", "d/__MACOSX/a.cls", "__MACOSX.jpg"]
    )
)
kinds = st.sampled_from(
    [tarfile.REGTYPE] * 5 + [tarfile.AREGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE]
)
formats = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
members = st.lists(st.tuples(names, kinds, st.binary(max_size=600)), max_size=12)


def pack_rows(rows: list[Row], format_: int) -> bytes:
    """Pack random members; those whose names the format cannot hold are left out."""
    fits = [row for row in rows if format_ != tarfile.USTAR_FORMAT or len(row[0]) < 100]
    # A trailing slash makes a folder of an old-style file, and folders have no data.
    return pack(
        [(special(name, kind), b"" if name.endswith("/") else value) for name, kind, value in fits],
        format=format_,
    )


Items = list[tuple[str, Any]]


@dataclass(slots=True)
class Reading:
    """The samples that were given, as ordered items, and the error that ended it, if any."""

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
    """Read each sample by its number, last first; None takes the place of a bad one.

    Parts of a torn sample are samples.
    """
    with closing(_publish(path, require_adjacent=False)) as reader:
        readings = [
            _read(map(reader.cutter(), [number])) for number in reversed(range(len(reader)))
        ]
    return [None if reading.error else reading.samples[0] for reading in readings][::-1]


def by_arrival(path: Path, start: int = 0) -> Reading:
    """Read the tar while its bytes arrive as asked for; the last sample is the index's."""
    stat = path.stat()

    def grant(ready_bytes: int) -> Arriving:
        return Arriving(
            type="arriving",
            id=0,
            lease=1,
            url=str(path),
            version="v1",
            path=str(path),
            inode=stat.st_ino,
            size_bytes=stat.st_size,
            ready_bytes=ready_bytes,
        )

    def more(beyond: int) -> Arriving | None:
        return grant(beyond + 1) if beyond < stat.st_size else None

    with closing(ArrivingShard(grant(0), more)) as shard:
        return _read(shard.samples(start))


def going_on(read: Callable[[Path, int], Reading], path: Path) -> list[Items | None]:
    """Read to the end as with a handler that continues; None takes a bad sample's place."""
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
    # webdataset raises what it likes; the tests say which they expect.
    except Exception as exn:  # noqa: BLE001
        reading.error = exn
    return reading
