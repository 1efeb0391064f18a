"""Grouping members into samples, against webdataset 1.0.2 itself."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.handlers import ignore_and_continue
from webdataset.tariterators import base_plus_ext

from shardcache.errors import SampleError, TornSampleError
from shardcache.shared.tarindex.grouping import split_name
from shardcache.shared.tarindex.tables import Fault, TarIndex, fault_of
from support.shards.odd_tars import (
    Row,
    by_arrival,
    by_index,
    by_lenient_index,
    by_number,
    by_webdataset,
    formats,
    going_on,
    members,
    pack_rows,
)
from support.shards.tars import pack, published

URL = "s3://bucket/train-000000.tar"


def is_of_macos(row: Row) -> bool:
    """Return True for a row that shardcache leaves out, and webdataset does not."""
    *folders, file = row[0].rstrip("/").split("/")
    return file.startswith("._") or file == ".DS_Store" or "__MACOSX" in [*folders, file]


@given(st.text("a._/\n", max_size=14))
def test_names_are_split_as_the_regular_expression_splits_them(name: str) -> None:
    """Key and extension equal webdataset's for all mixes of dots, slashes and line feeds."""
    key, extension = base_plus_ext(name)
    assert split_name(name.encode()) == ((key or "").encode(), (extension or "").encode())


def test_hostile_names_take_linear_time() -> None:
    """A megabyte of slashes splits at once, where the regular expression needs hours."""
    assert split_name(b"a/" * 500_000) == (b"", b"")
    assert split_name(b"a./" * 300_000 + b".x") == (b"", b"")


@settings(deadline=None)
@given(rows=members, format_=formats)
def test_samples_equal_those_of_webdataset(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], format_: int
) -> None:
    """Samples have webdataset's members, order and bytes, and we raise where it does.

    With handlers that go on, the good ones are webdataset's and as many, in whichever way they are
    read. webdataset is not given the members of macOS, and parts of a torn sample are accepted.
    """
    path = tmp_path_factory.getbasetemp() / "random.tar"
    path.write_bytes(pack_rows([row for row in rows if not is_of_macos(row)], format_))
    expected = by_webdataset(path)
    all_expected = by_webdataset(path, ignore_and_continue).samples
    path.write_bytes(pack_rows(rows, format_))
    found = by_lenient_index(path)
    assert found.samples == expected.samples
    if expected.error is None:
        assert found.error is None
    else:
        assert type(expected.error) is ValueError
        assert type(found.error) is SampleError
    all_found = going_on(by_lenient_index, path)
    assert [
        mine or theirs for mine, theirs in zip(all_found, all_expected, strict=True)
    ] == all_expected
    assert by_number(path) == all_found
    if isinstance(by_index(path).error, TornSampleError):
        arrived = by_arrival(path).samples
        assert arrived == all_found[: len(arrived)]
    else:
        assert going_on(by_arrival, path) == all_found[:-1]


@pytest.mark.parametrize("name", ["a.__key__", "a.__url__", "a.__BAD__"])
def test_a_member_cannot_take_the_place_of_a_samples_own_keys(tmp_path: Path, name: str) -> None:
    """An extension that would overwrite `__key__` or `__url__` is a fault that names it."""
    tar = pack([("a.jpg", b"1"), (name, b"2"), ("b.jpg", b"3")])
    index = TarIndex.open(published(tmp_path / "shard.tar", tar, URL)[1])
    assert index.faults[0][0] is Fault.RESERVED
    fault = fault_of(index, 0)
    assert fault == f"the sample 'a' has a member with the reserved extension {name[2:].lower()!r}"
    assert fault_of(index, 1) is None


def test_one_sample_keeps_its_first_fault(tmp_path: Path) -> None:
    """A sample has one fault however many members are double, so the table stays short."""
    tar = pack(
        [("a.jpg", b"1"), ("a.jpg", b"2"), ("a.JPG", b"3"), ("a.cls", b"4"), ("a.cls", b"5")]
    )
    index = TarIndex.open(published(tmp_path / "shard.tar", tar, URL)[1])
    assert re.search("'a' has two members with the extension 'jpg'", fault_of(index, 0) or "")
    assert len(index.faults) == 1
