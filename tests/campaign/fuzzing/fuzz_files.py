"""Any bytes as a tar, whole or arriving, compared with the standard library's; and as a sidecar."""

import atexit
import contextlib
import functools
import io
import itertools
import os
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from shardcache.errors import CorruptShardError, SampleError, ShardError
from shardcache.shared.protocol import Arriving
from shardcache.shared.tarindex.grouping import group
from shardcache.shared.tarindex.members import BLOCK_BYTES, ZERO_BLOCK, Member, Tar
from shardcache.shared.tarindex.tables import (
    Fault,
    Samples,
    TarIndex,
    fault_of,
    key_of,
    read_header,
)
from shardcache.store.shard import Facts
from shardcache_client.reading.leased.shards import ArrivingShard
from shardcache_client.samples.slicing import Sample, cut, undecoded_columns

Given = Sample | str | None

URL = "s3://bucket/a.tar"

# What an index may take of memory for each byte of its tar, and next to that.
_GROWTH = 8
_MIN_BYTES = 64 * 1024

# What tarfile raises over a tar that it does not like; it has no one class for that.
_TARFILE_ERRORS = (
    tarfile.TarError,
    ValueError,
    OverflowError,
    KeyError,
    IndexError,
    struct.error,
    zlib.error,
    EOFError,
)


def whole(data: bytes) -> None:
    members = _members(data, ignore_trailing_data=True)
    if members is None:
        return
    strict = _members(data)
    assert strict in (None, members), f"{strict} where trailing data are an error, else {members}"
    _check_spans(members, len(data))
    samples = group(members)
    _check_size(samples, len(data))
    expected = _by_tarfile(data)
    if expected is not None:
        regular, tail = expected
        found = [
            (name, bool(fault) or (start, end - start))
            for name, start, end, fault in _files(members)
        ]
        assert found == regular, f"tarfile has {regular}, the index {found}"
        assert (strict is None) == bool(tail.strip(b"\0")), f"behind the end: {tail[:1000]!r}"


def arriving(data: bytes) -> None:
    """Check that no prefix of a tar gives a sample that the whole has not."""
    # The last two bytes say in which steps the tar comes.
    step_bytes = 1 + int.from_bytes(data[-2:], "big")
    data = data[:-2]
    if not data:
        return
    members = _members(data, require_end=False, ignore_trailing_data=True)
    expected = None if members is None else _samples(group(members), data)
    given = _as_it_arrives(data, step_bytes)
    if expected is not None:
        found = list(given)
        assert found == expected[: len(found)], f"the whole gives {expected}, what arrives {found}"
        assert len(found) >= len(expected) - 1, (
            f"all but the last of {expected} had arrived, {found} were given"
        )
        return
    try:
        for _ in given:
            pass
    except ShardError:
        pass


def _members(
    data: bytes, *, require_end: bool = True, ignore_trailing_data: bool = False
) -> list[Member] | None:
    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        assert min_bytes <= max_bytes
        return data[at : at + max_bytes]

    try:
        return list(
            Tar(
                read,
                len(data),
                URL,
                require_end=require_end,
                ignore_trailing_data=ignore_trailing_data,
            )
        )
    except ShardError as exn:
        assert len(str(exn)) < 8192, "an error that nobody would read"
        return None


def _files(members: list[Member]) -> Iterator[Member]:
    """Yield the members that are no hard links, which lie before the member in front of them."""
    behind = 0
    for each in members:
        _, start, end, fault = each
        if fault is not Fault.LINK and start >= behind + BLOCK_BYTES:
            yield each
            behind = end


def _check_spans(members: list[Member], size_bytes: int) -> None:
    spans = {(0, 0)}
    behind = 0
    for _, start, end, fault in members:
        is_link = (start, end) in spans or fault is Fault.LINK
        assert is_link or behind + BLOCK_BYTES <= start, f"a member at {start}, behind {behind}"
        assert start <= end <= size_bytes, f"a member from {start} to {end} of {size_bytes}"
        spans.add((start, end))
        behind = max(behind, end)


def _check_size(samples: Samples, tar_bytes: int) -> None:
    taken = (
        len(samples.keys)
        + sum(map(len, samples.extensions))
        + 20 * len(samples.starts)
        + 16 * len(samples)
    )
    assert taken <= _GROWTH * tar_bytes + _MIN_BYTES, (
        f"{tar_bytes} bytes of tar became {taken} of index"
    )


def _by_tarfile(data: bytes) -> tuple[list[tuple[bytes, bool | tuple[int, int]]], bytes] | None:
    """Return the regular files as tarfile sees them and the bytes behind the block of zeros where
    it stops.

    None where it does not read on to such a block.
    """
    found: list[tuple[bytes, bool | tuple[int, int]]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for info in tar:
                if info.isreg():
                    name = info.name.encode("utf-8", "surrogateescape")
                    found.append((name, info.issparse() or (info.offset_data, info.size)))
            end = tar.offset + BLOCK_BYTES
    except (*_TARFILE_ERRORS, RecursionError):
        return None
    return (found, data[end:]) if data[end - BLOCK_BYTES : end] == ZERO_BLOCK else None


def _samples(tables: Samples, data: bytes) -> list[Given]:
    columns = undecoded_columns(tables.extensions, data)
    return [_sample(cut(tables, columns, URL, number, number + 1)) for number in range(len(tables))]


def _sample(given: Iterator[Sample]) -> Given:
    """Return the one sample, or why it cannot be given, or None where there is none."""
    try:
        return next(given, None)
    except SampleError as exn:
        return exn.message


def _as_it_arrives(data: bytes, step_bytes: int) -> Iterator[Given]:
    """Read a file of which ever more is there; what is not there yet is noise."""
    path = _scratch("arriving")
    ready_bytes = 0
    path.write_bytes(bytes(len(data)).replace(b"\0", b"U"))

    def more(beyond: int) -> Arriving | None:
        nonlocal ready_bytes
        if beyond >= len(data):
            return None
        steps = (beyond - ready_bytes) // step_bytes + 1
        came = data[ready_bytes : ready_bytes + steps * step_bytes]
        with open(path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), came, ready_bytes)
        ready_bytes += len(came)
        return grant()

    def grant() -> Arriving:
        return Arriving(
            type="arriving",
            id=1,
            lease=1,
            url=URL,
            version="v1",
            path=str(path),
            inode=path.stat().st_ino,
            size_bytes=len(data),
            ready_bytes=ready_bytes,
        )

    with contextlib.closing(ArrivingShard(grant(), more)) as shard:
        for number in itertools.count():
            sample = _sample(shard.samples(number, number + 1))
            if sample is None:
                return
            yield sample


def sidecar(data: bytes) -> None:
    path = _scratch("sidecar")
    path.write_bytes(data)
    try:
        index = TarIndex.open(path)
    except CorruptShardError as exn:
        assert len(str(exn)) < 8192, "an error that nobody would read"
        return
    try:
        _check_index(index, read_header(path))
    finally:
        index.close()


def _check_index(index: TarIndex, header: dict[str, object]) -> None:
    assert index.header == header or header != header, "a header reads otherwise without its tables"
    with contextlib.suppress(
        KeyError, TypeError, ValueError
    ):  # the store makes a CorruptShardError of these
        Facts.from_json(header)
    size_bytes = index.header["size_bytes"]
    member = 0
    for sample in range(len(index)):
        key_of(index, sample)
        fault_of(index, sample)
        for each in range(member, index.member_ends[sample]):
            assert 0 <= index.starts[each] <= index.ends[each] <= size_bytes
            assert isinstance(index.extensions[index.extension_ids[each]], str)
        member = index.member_ends[sample]
    assert member == len(index.starts), "members that belong to no sample"


@functools.cache
def _scratch(name: str) -> Path:
    folder = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / name
