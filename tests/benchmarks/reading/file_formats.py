"""Formats of files without a loader of their own, and the usual libraries to read them."""

import json
import zipfile
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from benchmarks.reading.format_contest import Contest, Item
from support.shards.tf_records import PACKED, example, framed

_FILE_SAMPLES = 10_000
_LARGE_IMAGES = 4  # of 2,000 bytes, which base64 makes a text of 11 KB
# The fastest of its ways to read all records in order, by processor time. Without a buffer, `read`
# takes eight times as long for records of 2 KB.
_ARRAY_RECORD_OPTIONS = "readahead_buffer_size:1048576,max_parallelism:1"


@dataclass(frozen=True, slots=True)
class _Files:
    """The samples of the files of a folder, again for each epoch."""

    folder: str
    read: Callable[[Path], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        for path in sorted(Path(self.folder).iterdir()):
            yield from self.read(path)


def _write(
    folder: Path, items: Iterable[Item], suffix: str, write: Callable[[Path, Iterable[Item]], None]
) -> None:
    folder.mkdir(parents=True)
    left = iter(items)
    number = 0
    while some := list(islice(left, _FILE_SAMPLES)):
        write(folder / f"{number:05d}{suffix}", some)
        number += 1


def _write_jsonl(path: Path, items: Iterable[Item], fields: Callable[[Item], Item]) -> None:
    with path.open("w") as file:
        for item in items:
            file.write(json.dumps(fields(item)) + "\n")


def _mixed_fields(item: Item) -> Item:
    return item | {"image": b64encode(item["image"]).decode()}


def _large_field(item: Item) -> Item:
    return {"image": b64encode(item["image"] * _LARGE_IMAGES).decode()}


def _small_fields(item: Item, count: int) -> Item:
    values = (item["label"], item["text"], item["image"][0] / 256, item["label"] % 2 == 0)
    return {f"field_{nth}": values[nth % len(values)] for nth in range(count)}


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open() as file:
        yield from map(json.loads, file)


def _write_zip(path: Path, items: Iterable[Item]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for item in items:
            for name, value in item.items():
                content = value if isinstance(value, bytes) else str(value)
                archive.writestr(f"{item['label']:08d}.{name}", content)


def _read_zip(path: Path) -> Iterator[Any]:
    with zipfile.ZipFile(path) as archive:
        for _, names in groupby(archive.namelist(), key=_key):
            yield {name.partition(".")[2]: archive.read(name) for name in names}


def _key(name: str) -> str:
    return name.partition(".")[0]


def _write_parquet(path: Path, items: Iterable[Item]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(items)), path, row_group_size=1000)


def _read_parquet(folder: str) -> Iterable[Any]:
    import datasets

    datasets.disable_progress_bars()
    files = [str(path) for path in sorted(Path(folder).iterdir())]
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)  # type: ignore[no-any-return]


def _example(item: Item) -> bytes:
    features = {
        "image": ("bytes_list", [item["image"]]),
        "label": ("int64_list", [item["label"]]),
        "text": ("bytes_list", [item["text"].encode()]),
    }
    return example(features)


def _write_tfrecord(path: Path, items: Iterable[Item]) -> None:
    path.write_bytes(framed(*map(_example, items)))


def _read_tfrecord(path: Path) -> Iterator[Any]:
    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
        "text": tf.io.FixedLenFeature([], tf.string),
    }
    records = tf.data.TFRecordDataset(str(path))
    yield from records.map(
        lambda record: tf.io.parse_single_example(record, features)
    ).as_numpy_iterator()


def _write_array_record(path: Path, items: Iterable[Item], record: Callable[[Item], bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path))
    for item in items:
        writer.write(record(item))
    writer.close()


def _image(item: Item) -> bytes:
    image: bytes = item["image"]
    return image


def _read_array_record(path: Path) -> Iterator[bytes]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(path), _ARRAY_RECORD_OPTIONS)
    for _ in range(reader.num_records()):
        yield reader.read()
    reader.close()


def _read_examples(path: Path) -> Iterator[Item]:
    """Yield the values of Examples, parsed by protobuf's compiled parser as in TensorFlow."""
    for record in _read_array_record(path):
        feature = PACKED.FromString(record).features.feature
        yield {
            "image": feature["image"].bytes_list.value[0],
            "label": feature["label"].int64_list.value[0],
            "text": feature["text"].bytes_list.value[0],
        }


def _contest(
    library: str,
    suffix: str,
    write: Callable[[Path, Iterable[Item]], None],
    read: Callable[[Path], Iterator[Any]],
) -> Contest:
    return Contest(
        library, partial(_write, suffix=suffix, write=write), "", partial(_Files, read=read)
    )


def _array_record(
    record: Callable[[Item], bytes], read: Callable[[Path], Iterator[Any]]
) -> Contest:
    return _contest(
        "array_record", ".array_record", partial(_write_array_record, record=record), read
    )


def _lines(fields: Callable[[Item], Item]) -> Contest:
    return _contest("json", ".jsonl", partial(_write_jsonl, fields=fields), _read_jsonl)


CONTESTS = {
    "JSON Lines": _lines(_mixed_fields),
    "JSON Lines of 8 small fields": _lines(partial(_small_fields, count=8)),
    "JSON Lines of 40 small fields": _lines(partial(_small_fields, count=40)),
    "JSON Lines of one large field": _lines(_large_field),
    "stored zips": _contest("zipfile", ".zip", _write_zip, _read_zip),
    "parquet files": Contest(
        "datasets", partial(_write, suffix=".parquet", write=_write_parquet), "", _read_parquet
    ),
    "TFRecord files": _contest("tensorflow", ".tfrecord", _write_tfrecord, _read_tfrecord),
    "ArrayRecord files": _array_record(_example, _read_examples),
    "ArrayRecord files of plain bytes": _array_record(_image, _read_array_record),
}
