"""Grouping members into samples, against webdataset 1.0.2 itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from shardcache.tarindex import Fault, Grouping, Tar, TarIndex, fault_of, index_tar, key_of, write
from shardcache.tarindex.samples import split_name
from shardcache_client.reader import ShardReader
from support.strategies import Row, formats, members, pack_rows
from support.tars import pack

URL = "s3://bucket/train-000000.tar"


def with_webdataset(path: Path) -> list[dict[str, Any]]:
    """Read a tar with webdataset, going on after its errors."""
    with open(path, "rb") as stream:
        files = tar_file_expander([{"url": URL, "stream": stream}])
        return list(group_by_keys(files, handler=lambda exn: True))


def indexed(path: Path) -> TarIndex:
    """Index a tar, and write and open its sidecar."""
    sidecar = path.with_suffix(".idx")
    write(sidecar, {"size_bytes": path.stat().st_size}, index_tar(path, URL))
    return TarIndex.open(sidecar)


@given(st.text("a._/\n", max_size=14))
def test_names_are_split_as_the_regular_expression_splits_them(name: str) -> None:
    """Key and extension equal webdataset's for every arrangement of dots, slashes and line feeds."""
    key, extension = base_plus_ext(name)
    assert split_name(name.encode()) == ((key or "").encode(), (extension or "").encode())


def test_hostile_names_take_linear_time() -> None:
    """A megabyte of slashes, over which the regular expression would backtrack for hours, is split at once."""
    assert split_name(b"a/" * 500_000) == (b"", b"")
    assert split_name(b"a./" * 300_000 + b".x") == (b"", b"")


@settings(deadline=None)
@given(rows=members, format_=formats)
def test_samples_equal_those_of_webdataset(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], format_: int
) -> None:
    """Keys, extensions, bytes, order and number of samples are webdataset's; where it raises, there is a fault."""
    path = tmp_path_factory.getbasetemp() / "random.tar"
    path.write_bytes(pack_rows(rows, format_))
    expected = with_webdataset(path)
    index = indexed(path)
    with ShardReader(path, path.with_suffix(".idx"), URL) as reader:
        assert len(reader) == len(expected)
        for number, sample in enumerate(expected):
            if index.fault(number) is None:
                assert reader.sample(number) == sample
            assert index.key(number) == sample["__key__"]
    assert bool(index.faults) == has_duplicates(path)


def has_duplicates(path: Path) -> bool:
    """Whether webdataset raises over this tar."""
    faults: list[Exception] = []
    with open(path, "rb") as stream:
        files = tar_file_expander([{"url": URL, "stream": stream}])
        list(group_by_keys(files, handler=lambda exn: not faults.append(exn)))  # type: ignore[func-returns-value]
    return bool(faults)


def test_only_consecutive_members_make_a_sample(tmp_path: Path) -> None:
    """A key that comes back later is another sample, as in webdataset."""
    path = tmp_path / "shard.tar"
    path.write_bytes(pack([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.cls", b"3")]))
    index = indexed(path)
    assert [index.key(number) for number in range(3)] == ["a", "b", "a"]
    assert index.faults == {}


@pytest.mark.parametrize("name", ["a.__key__", "a.__url__", "a.__BAD__"])
def test_a_member_cannot_take_the_place_of_a_samples_own_keys(tmp_path: Path, name: str) -> None:
    """An extension that would overwrite `__key__` or `__url__` is a fault that names it."""
    path = tmp_path / "shard.tar"
    path.write_bytes(pack([("a.jpg", b"1"), (name, b"2"), ("b.jpg", b"3")]))
    index = indexed(path)
    assert index.faults[0][0] is Fault.RESERVED
    assert index.fault(0) == f"the sample 'a' has a member with the reserved extension {name[2:].lower()!r}"
    assert index.fault(1) is None


def test_one_sample_keeps_its_first_fault(tmp_path: Path) -> None:
    """However many members are double, a sample has one fault: a hostile tar cannot make the table long."""
    path = tmp_path / "shard.tar"
    path.write_bytes(pack([("a.jpg", b"1"), ("a.jpg", b"2"), ("a.JPG", b"3"), ("a.cls", b"4"), ("a.cls", b"5")]))
    index = indexed(path)
    assert re.search("'a' has two members with the extension 'jpg'", index.fault(0) or "")
    assert len(index.faults) == 1


@given(rows=members, format_=formats)
def test_samples_can_be_read_off_while_members_come(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], format_: int
) -> None:
    """Member by member, all samples but the last are as they will be at the end; `finish` adds that one."""
    path = tmp_path_factory.getbasetemp() / "random.tar"
    path.write_bytes(pack_rows(rows, format_))
    data, final, grouping = path.read_bytes(), index_tar(path, URL), Grouping()
    for member in Tar(lambda at, least_bytes, most_bytes: data[at : at + most_bytes], len(data), URL, require_end=True):
        grouping.add([member])
        assert grouping.whole == max(len(grouping.samples) - 1, 0)
        for sample in range(grouping.whole):
            assert key_of(grouping.samples, sample) == key_of(final, sample)
            assert fault_of(grouping.samples, sample) == fault_of(final, sample)
            assert grouping.samples.member_ends[sample] == final.member_ends[sample]
    assert grouping.finish() == final
    assert grouping.whole == len(final)
