"""Members that hold a sample per line, in tars that are whole and in tars that arrive."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import UnsupportedShardError
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.members import Member
from shardcache.shared.tarindex.packed_lines import split_lines
from shardcache.shared.tarindex.tables import Samples, key_of
from support.shards.tars import pack

URL = "s3://bucket/train-000000.tar"


def found(samples: Samples, tar: bytes) -> list[tuple[str, str, bytes]]:
    begin = 0
    rows = []
    for sample, end in enumerate(samples.member_ends):
        for member in range(begin, end):
            content = tar[samples.starts[member] : samples.ends[member]]
            rows.append(
                (
                    key_of(samples, sample),
                    samples.extensions[samples.extension_ids[member]],
                    content,
                )
            )
        begin = end
    return rows


def indexed(path: Path, tar: bytes) -> list[tuple[str, str, bytes]]:
    path.write_bytes(tar)
    return found(index_tar(path, URL), tar)


def split(data: bytes, step_bytes: int, max_lines: int = 1000) -> list[tuple[bytes, bytes]]:
    """Return name and content of the lines of a member that is read in small steps."""

    def read(at: int, min_bytes: int, max_bytes: int) -> bytes:
        return data[at : at + max(min_bytes, min(max_bytes, step_bytes))]

    members: Iterator[Member] = iter([(b"__lines__/0098.txt", 0, len(data), None)])
    return [
        (name, data[start:end])
        for name, start, end, _ in split_lines(members, read, URL, max_lines)
    ]


@given(
    st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line), max_size=30),
    st.booleans(),
    st.integers(1, 9),
)
def test_each_line_is_a_sample(lines: list[bytes], ends: bool, step_bytes: int) -> None:
    """Every way of reading agrees; empty lines are counted and left out."""
    data = b"\n".join(lines) + b"\n" * ends
    expected = [(b"%04d.txt" % number, line) for number, line in enumerate(lines, 98) if line]
    assert split(data, step_bytes) == expected


def test_lines_lie_next_to_other_samples(tmp_path: Path) -> None:
    """Samples before, between and after them are what they are without."""
    tar = pack(
        [
            ("a.jpg", b"A"),
            ("__lines__/007.json", b"{}\n\n[1]\r\n"),
            ("b.jpg", b"B"),
            ("__lines__/010.txt", b"x"),
        ]
    )
    assert indexed(tmp_path / "a.tar", tar) == [
        ("a", "jpg", b"A"),
        ("007", "json", b"{}"),
        ("009", "json", b"[1]\r"),
        ("b", "jpg", b"B"),
        ("010", "txt", b"x"),
    ]


@pytest.mark.parametrize(
    "name",
    ["__lines__/a.json", "__lines__/1", "__lines__/1/2.json", "__line__/1.json", "__lines__.1/2"],
)
def test_other_metadata_is_skipped(tmp_path: Path, name: str) -> None:
    """As by WebDataset: only a number with an extension in that folder has lines."""
    assert indexed(tmp_path / "a.tar", pack([("1.txt", b"a"), (name, b"x\ny\n")])) == [
        ("1", "txt", b"a")
    ]


def test_repeated_lines_are_refused() -> None:
    """Whatever the bytes of the name of the hard link that repeats them."""
    members: list[Member] = [(b"__lines__/1.txt", 0, 4, None), (b"__lines__/2.\xff", 0, 4, None)]
    with pytest.raises(UnsupportedShardError, match="hard link to other lines"):
        list(split_lines(members, lambda at, least, most: b"a\nb\n"[at : at + most], URL))


def test_lines_are_limited() -> None:
    """A shard of nothing but short lines would need many times its size in memory."""
    assert len(split(b"a\n" * 20, 7, max_lines=20)) == 20
    with pytest.raises(UnsupportedShardError, match="more than 20 lines"):
        split(b"a\n" * 21, 7, max_lines=20)
