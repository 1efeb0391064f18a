"""Formats as their own libraries write and read them: every sample is compared with ours."""

import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.peers import litdata, mosaicml, write_litdata, write_mosaicml
from shardcache_client import ShardReader
from support.programs.daemon import Daemon
from support.shards.described import describe

COUNT = 300


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-formats-") as name,
        Daemon(Path(name)) as running,
    ):
        yield running


def read(url: str, daemon: Daemon) -> list[dict[str, Any]]:
    """Return our samples, described, without keys and urls."""
    return [described(sample) for sample in ShardReader(url, socket=daemon.socket)]


def described(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: describe(value) for name, value in sample.items() if not name.startswith("__")}


def rows() -> Iterator[dict[str, Any]]:
    """Yield rows of types that most formats have: texts, numbers, bytes and an array."""
    source = Random(1)
    for number in range(COUNT):
        yield {
            "number": number - COUNT // 2,
            "text": "é" * source.randrange(50),
            "body": source.randbytes(source.randrange(3000)),
            "score": source.random(),
            "array": np.arange(1 + source.randrange(20), dtype=np.float32),
        }


# The library leaves files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(
    find_spec("streaming") is None, reason="needs mosaicml-streaming: see the Makefile"
)
@pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2", "snappy"])
def test_mds_is_as_streaming_reads_it(
    daemon: Daemon, tmp_path: Path, compression: str | None
) -> None:
    """Columns of several encodings in several shards."""
    columns = {
        "number": "int",
        "text": "str",
        "body": "bytes",
        "score": "float64",
        "array": "ndarray",
    }
    folder = tmp_path / "set"
    write_mosaicml(folder, columns, rows(), size_limit=100_000, compression=compression)
    ours = read(f"file://{folder}/", daemon)
    local = str(tmp_path / "local")
    dataset = mosaicml().StreamingDataset(
        remote=str(folder), local=local, shuffle=False, batch_size=1
    )
    assert ours == [described(sample) for sample in dataset]


def leaves(*names: str) -> Iterable[dict[str, Any]]:
    return ({name: row[name] for name in names} for row in rows())


@pytest.mark.parametrize("names", [("number", "body", "array"), ("number", "text", "score")])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_litdata_is_as_litdata_reads_it(
    daemon: Daemon, tmp_path: Path, names: tuple[str, ...], compression: str | None
) -> None:
    """Chunks of leaves, and of rows in Arrow's format."""
    pytest.importorskip("litdata")
    write_litdata(tmp_path, leaves(*names), chunk_bytes=100_000, compression=compression)
    ours = read(f"file://{tmp_path}/", daemon)
    assert ours == [described(sample) for sample in litdata(str(tmp_path))]


def examples(tf: Any) -> list[bytes]:
    """Return Examples; their features have a fixed number of values."""
    encoded = []
    for row in rows():
        features = {
            "number": tf.train.Feature(int64_list=tf.train.Int64List(value=[row["number"]])),
            "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[row["text"].encode()])),
            "body": tf.train.Feature(bytes_list=tf.train.BytesList(value=[row["body"]])),
            "score": tf.train.Feature(float_list=tf.train.FloatList(value=[row["score"]])),
            "box": tf.train.Feature(float_list=tf.train.FloatList(value=[0, row["score"], 1, -1])),
            "tokens": tf.train.Feature(
                int64_list=tf.train.Int64List(value=range(-7, row["number"] + 200))
            ),
        }
        encoded.append(
            tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
        )
    return encoded


def parsed(tf: Any, record: Any) -> dict[str, Any]:
    """Return an Example's values as TensorFlow parses them; numbers as Python's."""
    features = {
        "number": tf.io.FixedLenFeature([], tf.int64),
        "text": tf.io.FixedLenFeature([], tf.string),
        "body": tf.io.FixedLenFeature([], tf.string),
        "score": tf.io.FixedLenFeature([], tf.float32),
        "box": tf.io.FixedLenFeature([4], tf.float32),
        "tokens": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
    }
    found = {
        name: value.numpy() for name, value in tf.io.parse_single_example(record, features).items()
    }
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_tfrecord_is_as_tensorflow_reads_it(
    daemon: Daemon, tmp_path: Path, compression: str
) -> None:
    """With every kind of list."""
    tf = pytest.importorskip("tensorflow")
    path = tmp_path / f"a.tfrecord{'.gz' if compression else ''}"
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression)) as writer:
        for record in examples(tf):
            writer.write(record)
    theirs = [
        described(parsed(tf, record)) for record in tf.data.TFRecordDataset(str(path), compression)
    ]
    assert read(f"file://{path}", daemon) == theirs


@pytest.mark.parametrize(
    "options", ["group_size:1", "group_size:7,zstd:9", "group_size:100,uncompressed"]
)
def test_array_record_is_as_array_record_reads_it(
    daemon: Daemon, tmp_path: Path, options: str
) -> None:
    """Records of any bytes, among them empty ones and one larger than a block."""
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a.array_record"
    writer = module.ArrayRecordWriter(str(path), options)
    for record in [
        b"\xff no Example",
        *(row["body"] for row in rows()),
        Random(2).randbytes(200_000),
    ]:
        writer.write(record)
    writer.close()
    reader = module.ArrayRecordReader(str(path))
    theirs = [{"record": describe(record)} for record in reader.read_all()]
    assert read(f"file://{path}", daemon) == theirs


def test_parquet_is_as_datasets_reads_it(daemon: Daemon, tmp_path: Path) -> None:
    """By its streaming loader; a null is left out of our samples."""
    datasets = pytest.importorskip("datasets")
    table = []
    for row in rows():
        number = row["number"]
        row["array"] = row["array"].tolist()
        row["nested"] = {"a": [number, None], "b": row["text"]}
        row["maybe"] = None if number % 3 else number
        table.append(row)
    path = tmp_path / "a.parquet"
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(table).to_parquet(str(path), batch_size=37)
    streamed = datasets.load_dataset(
        "parquet", data_files=[str(path)], split="train", streaming=True
    )
    theirs = [{name: value for name, value in row.items() if value is not None} for row in streamed]
    assert read(f"file://{path}", daemon) == [described(row) for row in theirs]
