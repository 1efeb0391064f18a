"""Any bytes as a sidecar: an index in which every number leads somewhere, or a typed error."""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import tempfile
from pathlib import Path

from shardcache.errors import CorruptShardError
from shardcache.store.shard import Facts
from shardcache.tarindex import TarIndex, fault_of, key_of, read_header


def check(data: bytes) -> None:
    """Read all of a sidecar."""
    path = _scratch()
    path.write_bytes(data)
    try:
        index = TarIndex.open(path)
    except CorruptShardError as exn:
        assert len(str(exn)) < 8192, "an error that nobody would read"
        return
    try:
        _check(index, read_header(path))
    finally:
        index.close()


def _check(index: TarIndex, header: dict[str, object]) -> None:
    assert index.header == header or header != header, "a header reads otherwise without its tables"
    with contextlib.suppress(KeyError, TypeError, ValueError):  # the store makes a CorruptShardError of these
        Facts.from_json(header)
    size_bytes, member = index.header["size_bytes"], 0
    for sample in range(len(index)):
        key_of(index, sample)
        fault_of(index, sample)
        for each in range(member, index.member_ends[sample]):
            assert 0 <= index.starts[each] <= index.ends[each] <= size_bytes
            assert isinstance(index.extensions[index.extension_ids[each]], str)
        member = index.member_ends[sample]
    assert member == len(index.starts), "members that belong to no sample"


@functools.cache
def _scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "sidecar"
