"""Files of further formats, with the same rows in each, written by Python's libraries."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardcache.shared.formats.zstd_library import zstd_library
from support.shards.tf_records import example, framed

zstd = zstd_library()

SHARDS = 3
SAMPLES = 10

Row = dict[str, Any]


def rows_of_shard(shard: int) -> list[Row]:
    return [_row(number) for number in range(shard * SAMPLES, (shard + 1) * SAMPLES)]


def _row(number: int) -> Row:
    image = Random(number).randbytes(2_000)
    return {
        "__key__": f"n{number:03d}",
        "image": image,
        "text": f"Text é {number}",
        "label": number,
    }


def zipped(rows: list[Row], method: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        for name in ("image", "text", "label"):  # members of a sample lie apart
            for row in rows:
                value = row[name]
                archive.writestr(
                    f"{row['__key__']}.{name}", value if name == "image" else str(value)
                )
    return data.getvalue()


def json_lines(rows: list[Row]) -> bytes:
    return b"".join(
        json.dumps(row | {"image": row["image"].decode("latin-1")}).encode() + b"\n" for row in rows
    )


def tf_records(rows: list[Row]) -> bytes:
    records = []
    for row in rows:
        features = {
            "__key__": ("bytes_list", [row["__key__"].encode()]),
            "image": ("bytes_list", [row["image"]]),
            "text": ("bytes_list", [row["text"].encode()]),
            "label": ("int64_list", [row["label"]]),
        }
        records.append(example(features))
    return framed(*records)


def parquet(rows: list[Row]) -> bytes:
    data = io.BytesIO()
    images = [row | {"image": {"bytes": row["image"], "path": None}} for row in rows]
    pq.write_table(pa.Table.from_pylist(images), data, row_group_size=4)
    return data.getvalue()


def through(
    compress: Callable[[bytes], bytes], write: Callable[[list[Row]], bytes]
) -> Callable[[list[Row]], bytes]:
    return lambda rows: compress(write(rows))


FORMATS: dict[str, Callable[[list[Row]], bytes]] = {
    "stored.zip": zipped,
    "deflated.ZIP": partial(zipped, method=zipfile.ZIP_DEFLATED),
    "a.jsonl": json_lines,
    "b.ndjson": json_lines,
    "c.jsonl.gz": through(gzip.compress, json_lines),
    "d.jsonl.zst": through(zstd.compress, json_lines),
    "a.tfrecord": tf_records,
    "b.tfrecords": tf_records,
    "c.tfrecord.gz": through(gzip.compress, tf_records),
    "a.parquet": parquet,
}


def plain(sample: Row) -> Row:
    """Return a sample as it was written, whatever the types in which its format has the values."""
    image = sample["image"]
    text = sample["text"]
    return {
        "__key__": sample["__key__"],
        "image": image.encode("latin-1") if isinstance(image, str) else image,
        "text": text.decode() if isinstance(text, bytes) else text,
        "label": int(sample["label"]),
    }


EXPECTED = [row for shard in range(SHARDS) for row in rows_of_shard(shard)]
