"""MDS shards, sound and damaged: their samples or a located error, never foreign bytes."""

import json
from pathlib import Path
from struct import pack, unpack_from
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import (
    CorruptShardError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats.chunks.mds import MDS
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.tarindex.tables import Samples, key_of
from support import TESTS

DATA = TESTS / "data/formats/mds"
URL = "s3://bucket/set/shard.00000.mds"
PLAIN = (DATA / "plain/shard.00000.mds").read_bytes()


def shard(samples: list[list[bytes]], config: dict[str, Any] | None = None) -> bytes:
    """Return a shard of samples whose columns, named by letters, have no fixed size."""
    names = [chr(ord("a") + nth) for nth in range(len(samples[0]))]
    described = {
        "column_names": names,
        "column_encodings": ["bytes"] * len(names),
        "column_sizes": [None] * len(names),
        "format": "mds",
        "version": 2,
    }
    head = json.dumps(described | (config or {})).encode()
    bodies = [b"".join([pack("<I", len(each)) for each in sample] + sample) for sample in samples]
    at = 4 * (len(samples) + 2) + len(head)
    offsets = [at]
    for body in bodies:
        at += len(body)
        offsets.append(at)
    return pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + head + b"".join(bodies)


def indexed(folder: Path, data: bytes) -> Samples:
    path = folder / "shard"
    path.write_bytes(data)
    return MDS.index(path, URL, IndexOptions())


def contents(samples: Samples, data: bytes) -> list[dict[str, bytes]]:
    """Return the columns of each sample, as bytes."""
    found = []
    first = 0
    for last in samples.member_ends:
        names = [samples.extensions[nth] for nth in samples.extension_ids[first:last]]
        spans = zip(samples.starts[first:last], samples.ends[first:last], strict=True)
        found.append(
            {name: data[start:end] for name, (start, end) in zip(names, spans, strict=True)}
        )
        first = last
    return found


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.binary(max_size=9), min_size=width, max_size=width), min_size=1, max_size=6
        )
    )
)
def test_any_samples_are_found(
    tmp_path_factory: pytest.TempPathFactory, samples: list[list[bytes]]
) -> None:
    """Each column has its bytes, and each sample its number as its key."""
    data = shard(samples)
    found = indexed(tmp_path_factory.mktemp("mds"), data)
    assert contents(found, data) == [dict(zip("abcd", each, strict=False)) for each in samples]
    assert [key_of(found, nth) for nth in range(len(found))] == [
        f"{nth:08d}" for nth in range(len(samples))
    ]


@given(st.integers(0, len(PLAIN) - 1), st.integers(0, 255))
def test_changed_byte_never_leads_out_of_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    place: int,
    value: int,
) -> None:
    """A shard with any byte changed is refused, or all of its columns lie in it."""
    data = bytearray(PLAIN)
    data[place] = value
    try:
        found = indexed(tmp_path_factory.mktemp("mds"), bytes(data))
    except ShardError as exn:
        assert exn.url == URL
        return
    assert max(found.ends) <= len(PLAIN)
    assert all(start <= end for start, end in zip(found.starts, found.ends, strict=True))


@given(st.integers(0, len(PLAIN) - 1))
def test_every_cut_is_noticed(tmp_path_factory: pytest.TempPathFactory, size_bytes: int) -> None:
    """The last offset says where the shard should end."""
    with pytest.raises((TruncatedShardError, CorruptShardError)):
        indexed(tmp_path_factory.mktemp("mds"), PLAIN[:size_bytes])


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ({"column_names": ["a"]}, CorruptShardError, "names"),
        ({"column_names": "ab"}, CorruptShardError, "not lists"),
        ({"column_encodings": None}, CorruptShardError, "not lists"),
        ({"column_sizes": 7}, CorruptShardError, "damaged"),
        ({"column_names": ["a", "a"]}, CorruptShardError, "same name"),
        ({"column_names": ["a", 3]}, CorruptShardError, "not text"),
        ({"column_names": ["a", "\ud800"]}, CorruptShardError, "not text"),
        ({"column_sizes": [None, -1]}, CorruptShardError, "positive"),
        ({"column_sizes": [2**31, None]}, CorruptShardError, "end at byte"),
        ({"column_sizes": [2**64, None]}, CorruptShardError, "32 bits"),
        ({"column_names": ["a", "__key__"]}, UnsupportedShardError, "__key__"),
        ({"version": 3}, UnsupportedShardError, "version 3"),
        ({"format": "xsv"}, UnsupportedShardError, "xsv"),
    ],
)
def test_descriptions_that_contradict_themselves_are_refused(
    tmp_path: Path,
    config: dict[str, Any],
    error: type[ShardError],
    match: str,
) -> None:
    """The error says what is wrong, and of which shard."""
    with pytest.raises(error, match=match) as caught:
        indexed(tmp_path, shard([[b"1", b"2"]], config))
    assert caught.value.url == URL


def test_count_of_billions_takes_no_memory(tmp_path: Path) -> None:
    """The number of samples is compared with the size of the file before anything is read by it."""
    with pytest.raises(TruncatedShardError, match="too few"):
        indexed(tmp_path, pack("<2I", 2**32 - 1, 20))


def test_index_names_shards_with_their_counts() -> None:
    """Compressed shards are listed by the name and the size that they have in the store."""
    listed = MDS.listed_shards(json.loads((DATA / "zstd/index.json").read_text()))
    assert listed is not None
    (only,) = listed
    assert only.name == "shard.00000.mds.zstd"
    assert only.samples == 11
    assert only.size_bytes == (DATA / "zstd/shard.00000.mds.zstd").stat().st_size


def test_offsets_of_the_library_are_read_as_they_are() -> None:
    """The fixture is what it claims to be: its last offset is its size."""
    (count,) = unpack_from("<I", PLAIN)
    assert unpack_from("<I", PLAIN, 4 * (count + 1)) == (len(PLAIN),)
