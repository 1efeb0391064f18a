"""Writes the files of this folder (needs `pip install tensorflow-cpu array_record`).

Each has the same Examples, of which `EXAMPLES` of tests/unit/shared/formats/test_record_files.py
has the values.
"""

import lzma
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf
from array_record.python.array_record_module import ArrayRecordWriter

FOLDER = Path(__file__).parent
OPTIONS = {
    "zstd": "group_size:1",
    "groups": "group_size:4,zstd",
    "plain": "group_size:1,uncompressed",
}
OPTIONS |= {"brotli": "group_size:4,brotli", "transposed": "group_size:4,transpose:true"}


def example(number: int) -> bytes:
    def feature(**values: Any) -> tf.train.Feature:
        kind, found = values.popitem()
        message = {
            "bytes_list": tf.train.BytesList,
            "float_list": tf.train.FloatList,
            "int64_list": tf.train.Int64List,
        }
        return tf.train.Feature(**{kind: message[kind](value=found)})

    features = {
        "image": feature(bytes_list=[bytes([number]) * 9000 * number]),
        "label": feature(int64_list=[number - 3]),
        "box": feature(float_list=[0.5, number, -1.25, 4]),
        "tokens": feature(int64_list=range(number * 100, number * 100 + 40)),
        "names": feature(bytes_list=[b"a", b"b"]),
    }
    encoded: bytes = tf.train.Example(
        features=tf.train.Features(feature=features)
    ).SerializeToString()
    return encoded


def main() -> None:
    records = [example(number) for number in range(12)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tf.io.TFRecordWriter(str(folder / "examples.tfrecord")) as writer:
            for record in records:
                writer.write(record)
        for kind, options in OPTIONS.items():
            array_writer = ArrayRecordWriter(str(folder / f"{kind}.array_record"), options)
            for record in records:
                array_writer.write(record)
            array_writer.close()
        for path in folder.iterdir():
            (FOLDER / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes(), preset=9))


if __name__ == "__main__":
    main()
