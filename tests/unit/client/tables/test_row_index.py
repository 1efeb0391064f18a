"""Rows of a written file by their keys, whatever the keys' hashes have in common."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardcache.errors import CacheDirError
from shardcache_client.tables import row_index
from shardcache_client.tables.row_index import RowCounts, RowIndex


def written(folder: Path, rows: Iterable[tuple[str, int]]) -> tuple[RowIndex, RowCounts]:
    """Write rows, each of a key and one value; return them by key, and their numbers."""
    path = folder / "table.rows"
    with path.open("wb") as file:
        counts = row_index.write(
            file, ((key, json.dumps([key, {"v": value}])) for key, value in rows), folder
        )
    return RowIndex(path), counts


@pytest.mark.parametrize("count", [0, 1, 300, 33_000])
def test_each_key_has_its_own_row(tmp_path: Path, count: int) -> None:
    """Tables without rows, with few, or with many groups in a bucket hold no other keys."""
    keys = [f"a “{number}”" for number in range(count)]
    index, counts = written(tmp_path, zip(keys, range(count), strict=True))
    assert counts == RowCounts(count, 0)
    assert len(index) == count
    assert all(index.rows(key) == [{"v": number}] for number, key in enumerate(keys))
    assert not any(index.rows(f"b{number}") for number in range(1_000))
    assert set(index.some_keys(3)) <= set(keys)


def test_rows_with_one_key_are_found_in_the_order_of_the_file(tmp_path: Path) -> None:
    """And those after the first are counted."""
    index, counts = written(tmp_path, [("a", 1), ("b", 2), ("a", 3), ("c", 4), ("a", 5)])
    assert counts == RowCounts(5, 2)
    assert index.rows("a") == [{"v": 1}, {"v": 3}, {"v": 5}]
    assert index.rows("b") == [{"v": 2}]


def test_keys_with_the_same_bits_in_the_index_are_told_apart(tmp_path: Path) -> None:
    """Two keys share the first 28 bits of their hashes, all that a small table has."""
    seen: dict[int, str] = {}
    for number in range(1_000_000):
        beginning = row_index._hash_of(str(number)) >> 36
        first = seen.setdefault(beginning, str(number))
        if first != str(number):
            break
    second = str(number)
    index, counts = written(tmp_path, [(second, 2), (first, 1)])
    assert counts == RowCounts(2, 0)
    assert index.rows(first) == [{"v": 1}]
    assert index.rows(second) == [{"v": 2}]
    index, _ = written(tmp_path, [(first, 1)])
    assert index.rows(second) == []


@pytest.mark.parametrize("size_bytes", [0, 31, 10_000])
def test_another_file_is_a_typed_error(tmp_path: Path, size_bytes: int) -> None:
    """One that has no index at its end, or is too short for one."""
    path = tmp_path / "table.rows"
    path.write_bytes(bytes(size_bytes))
    with pytest.raises(CacheDirError, match="What to do: remove it"):
        RowIndex(path)


def test_row_that_was_damaged_on_the_disk_is_a_typed_error(tmp_path: Path) -> None:
    """It names the file, which is not the fault of the sample; other rows are found."""
    written(tmp_path, [("a", 1), ("b", 2)])
    path = tmp_path / "table.rows"
    path.write_bytes(path.read_bytes().replace(b'["a"', b"\0\0\0\0"))
    index = RowIndex(path)
    with pytest.raises(CacheDirError, match="is not a table of rows, or is damaged"):
        index.rows("a")
    assert index.rows("b") == [{"v": 2}]
