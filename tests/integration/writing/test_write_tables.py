"""`shardcache write` from parquet files and from saved datasets."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardcache.cli.common import FAILED, USAGE
from shardcache.writing import ShardWriter
from support.programs.cli import shardcache
from support.shards.tars import Samples, rows, samples, shards

JPEG, PNG = b"\xff\xd8\xff" + bytes(500), b"\x89PNG\r\n\x1a\n" + bytes(700)
SIZE = ("--shard-size", "50kB", "--workers", "1")  # each imports pyarrow; the tests about several say how many
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
        "boxes.json": json.dumps([{"x": number, "day": "2026-01-01"}], separators=(",", ":")).encode(),
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
        pq.write_table(table.slice(45 * part, 45), folder / f"part-{part}.parquet", row_group_size=10)
    return folder


def test_rows_become_samples(parquet: Path, tmp_path: Path) -> None:
    """Each column by its type, images by their first bytes; nulls are left out; shards keep to the limit."""
    ran = shardcache("write", parquet, tmp_path / "out", *SIZE)
    assert ran.code == 0, ran.err
    assert list(samples(tmp_path / "out").items()) == list(EXPECTED.items())
    assert len(rows(tmp_path / "out")) > 5 and max(row["filesize"] for row in rows(tmp_path / "out")) <= 50_000


def test_columns_are_chosen_and_named(parquet: Path, tmp_path: Path) -> None:
    """`--columns` takes those alone, under the extension given; one that does not exist is refused with the others."""
    ran = shardcache("write", parquet, tmp_path / "out", "--columns", "image=img,label=cls")
    assert ran.code == 0, ran.err
    found = samples(tmp_path / "out")
    assert found["000000011"] == {"img": row(11)["image"]["bytes"], "cls": b"4"}
    refused = shardcache("write", parquet, tmp_path / "other", "--columns", "picture=jpg")
    assert refused.code == USAGE and "'picture'" in refused.err and "caption" in refused.err
    assert shardcache("write", parquet, tmp_path / "other", "--columns", "picture").code == USAGE


def test_rows_are_shuffled_by_a_seed(parquet: Path, tmp_path: Path) -> None:
    """Row groups and the rows in each: another order, the same samples, the same bytes for the same seed."""
    for name, seed, workers in (("a", "7", "1"), ("b", "7", "3"), ("c", "8", "1")):
        assert shardcache("write", parquet, tmp_path / name, *SIZE, "--shuffle", seed, "--workers", workers).code == 0
    a, b, c = (shards(tmp_path / name) for name in "abc")
    assert a == b != c
    found = samples(tmp_path / "a")
    assert found == EXPECTED and list(found) != list(EXPECTED)
    assert [int(key) // 10 for key in found] != sorted(int(key) // 10 for key in found)


def test_a_damaged_file_is_named(parquet: Path, tmp_path: Path) -> None:
    """A parquet file that was cut short is an error with its path, and no index is written."""
    damaged = parquet / "part-1.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    ran = shardcache("write", parquet, tmp_path / "out", "--json")
    assert ran.code == FAILED and ran.json["error"]["code"] == "input" and "part-1.parquet" in ran.err
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_saved_dataset_becomes_samples(tmp_path: Path) -> None:
    """Features as columns of parquet; of several splits, one is to be chosen; files that it refers to are read."""
    datasets = pytest.importorskip("datasets", reason="needs pip install 'shardcache[datasets]'")
    (tmp_path / "file.png").write_bytes(PNG)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    images = [{"bytes": JPEG, "path": None}, {"bytes": None, "path": str(tmp_path / "file.png")}]
    test = datasets.Dataset.from_dict({"image": images * 5, "label": [0, 1] * 5}, features=features)
    train = test.select(range(4))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    refused = shardcache("write", tmp_path / "saved", tmp_path / "out")
    assert refused.code == USAGE and "--split: train, test" in refused.err
    command = ("write", tmp_path / "saved", tmp_path / "out", "--split", "test", "--shard-size", "8kB", "--json")
    ran = shardcache(*command)
    assert ran.code == 0, ran.err
    pair = [{"image.jpg": JPEG, "label.cls": b"0"}, {"image.png": PNG, "label.cls": b"1"}]
    assert samples(tmp_path / "out") == {f"{number:09d}": pair[number % 2] for number in range(10)}
    assert shardcache(*command).json["written"] == 0
    assert shardcache("write", tmp_path / "saved" / "train", tmp_path / "whole", "--shuffle", "1").code == 0
    assert len(samples(tmp_path / "whole")) == 4


def test_rows_of_a_stream_are_written_by_a_program(tmp_path: Path) -> None:
    """As the documentation has it: files that are not decoded are written as they are, of a stream and of a dataset."""
    datasets = pytest.importorskip("datasets", reason="needs pip install 'shardcache[datasets]'")
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    saved = datasets.Dataset.from_dict(
        {"image": [{"bytes": JPEG, "path": None}] * 3, "caption": ["é", "", "c"]}, features=features
    )
    for name, found in (("stream", saved.to_iterable_dataset()), ("dataset", saved)):
        with ShardWriter(tmp_path / name) as writer:
            for number, one in enumerate(found.cast_column("image", datasets.Image(decode=False))):
                writer.write({"__key__": f"{number:09d}", "jpg": one["image"]["bytes"], "txt": one["caption"]})
        texts = ("é".encode(), b"", b"c")
        assert samples(tmp_path / name) == {f"{n:09d}": {"jpg": JPEG, "txt": text} for n, text in enumerate(texts)}
