"""`shardcache write` of rows: parquet files, saved datasets, and columns that become members."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardcache.cli.common import USAGE
from support.programs.cli import shardcache
from support.shards.tars import Samples, samples, shards

# One process, for each costs half a second of a core; the tests that are about several say how
# many.
ALONE = ("--workers", "1")


JPEG = b"\xff\xd8\xff" + bytes(500)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(700)


ROW_SIZE = ("--shard-size", "50kB", "--workers", "1")


ROWS = 90


def row(number: int) -> dict[str, Any]:
    """Return a row of every kind of column."""
    return {
        "image": {"bytes": (PNG if number % 2 else JPEG) + bytes([number]), "path": None},
        "raw": bytes([number]),
        "caption": f"größer {number}" if number % 3 else None,
        "label": number % 7,
        "boxes": [{"x": number, "day": date(2026, 1, 1)}],
        "score": number / 2,
    }


def sample(number: int) -> dict[str, bytes]:
    """Return what such a row becomes."""
    members = {
        "image.png" if number % 2 else "image.jpg": row(number)["image"]["bytes"],
        "raw.bin": bytes([number]),
        "caption.txt": f"größer {number}".encode(),
        "label.cls": str(number % 7).encode(),
        "boxes.json": json.dumps(
            [{"x": number, "day": "2026-01-01"}], separators=(",", ":")
        ).encode(),
        "score.json": str(number / 2).encode(),
    }
    return {name: data for name, data in members.items() if number % 3 or name != "caption.txt"}


EXPECTED: Samples = {f"{number:09d}": sample(number) for number in range(ROWS)}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Two files of 45 rows in row groups of 10."""
    folder = tmp_path / "parquet"
    folder.mkdir()
    table = pa.Table.from_pylist([row(number) for number in range(ROWS)])
    for part in range(2):
        pq.write_table(
            table.slice(45 * part, 45), folder / f"part-{part}.parquet", row_group_size=10
        )
    return folder


@pytest.mark.slow
def test_columns_are_chosen_and_named(parquet: Path, tmp_path: Path) -> None:
    """`--columns` takes those alone; one that does not exist is refused with the others."""
    ran = shardcache("write", *ALONE, parquet, tmp_path / "out", "--columns", "image=img,label=cls")
    assert ran.code == 0, ran.err
    found = samples(tmp_path / "out")
    assert found["000000011"] == {"img": row(11)["image"]["bytes"], "cls": b"4"}
    refused = shardcache("write", *ALONE, parquet, tmp_path / "other", "--columns", "picture=jpg")
    assert refused.code == USAGE
    assert "'picture'" in refused.err
    assert "caption" in refused.err
    code = shardcache("write", *ALONE, parquet, tmp_path / "other", "--columns", "picture").code
    assert code == USAGE


@pytest.mark.slow
def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Unless they are left out: nothing tells which of them is meant."""
    table = pa.table(
        [pa.array([1]), pa.array(["b"]), pa.array(["c"])], names=["label", "text", "text"]
    )
    file = tmp_path / "twice.parquet"
    pq.write_table(table, file)
    for columns in ((), ("--columns", "text=txt")):
        refused = shardcache("write", *ALONE, file, tmp_path / f"out-{len(columns)}", *columns)
        assert refused.code == USAGE
        assert "two columns have the name 'text'" in refused.err
    assert shardcache("write", *ALONE, file, tmp_path / "out", "--columns", "label=cls").code == 0
    assert samples(tmp_path / "out") == {"000000000": {"cls": b"1"}}


@pytest.mark.slow
def test_rows_are_shuffled_by_a_seed(parquet: Path, tmp_path: Path) -> None:
    """Row groups and rows change their order, and the same seed gives the same bytes."""
    for name, seed, workers in (("a", "7", "1"), ("b", "7", "2"), ("c", "8", "1")):
        options = ("--shuffle", seed, "--workers", workers)
        assert shardcache("write", parquet, tmp_path / name, *ROW_SIZE, *options).code == 0
    first, same_seed, other_seed = (shards(tmp_path / name) for name in "abc")
    assert first == same_seed != other_seed
    found = samples(tmp_path / "a")
    assert found == EXPECTED
    assert list(found) != list(EXPECTED)
    assert [int(key) // 10 for key in found] != sorted(int(key) // 10 for key in found)


def test_a_saved_dataset_becomes_samples(tmp_path: Path) -> None:
    """Features become columns; one of several splits is to be chosen, and files are read."""
    datasets = pytest.importorskip("datasets", reason="needs pip install 'shardcache[datasets]'")
    (tmp_path / "file.png").write_bytes(PNG)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    images = [{"bytes": JPEG, "path": None}, {"bytes": None, "path": str(tmp_path / "file.png")}]
    test = datasets.Dataset.from_dict({"image": images * 5, "label": [0, 1] * 5}, features=features)
    train = test.select(range(4))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    refused = shardcache("write", *ALONE, tmp_path / "saved", tmp_path / "out")
    assert refused.code == USAGE
    assert "--split: train, test" in refused.err
    command = (
        "write",
        tmp_path / "saved",
        tmp_path / "out",
        "--split",
        "test",
        "--shard-size",
        "8kB",
        "--json",
    )
    ran = shardcache(*command)
    assert ran.code == 0, ran.err
    pair = [{"image.jpg": JPEG, "label.cls": b"0"}, {"image.png": PNG, "label.cls": b"1"}]
    assert samples(tmp_path / "out") == {f"{number:09d}": pair[number % 2] for number in range(10)}
    assert shardcache(*command).json["written"] == 0
    whole = (tmp_path / "saved" / "train", tmp_path / "whole")
    assert shardcache("write", *ALONE, *whole, "--shuffle", "1").code == 0
    assert len(samples(tmp_path / "whole")) == 4
    wrong = shardcache(
        "write", *ALONE, tmp_path / "saved" / "train", tmp_path / "wrong", "--split", "test"
    )
    assert wrong.code == USAGE
    assert "the dataset has no split test" in wrong.err
