"""Write the data sets in this folder with the libraries whose formats they have.

    PYTHONPATH=tests python tests/data/formats/make.py mds litdata

Beside each set lies `values.json`: for each sample, what the library itself gives for it, as
`describe` writes it. It takes mosaicml-streaming 0.13 and litdata 0.2.76 with numpy, pillow, torch.
"""

import io
import json
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.shards.described import describe

HERE = Path(__file__).parent
SAMPLES = 11


def picture(number: int) -> Image.Image:
    """Return a small image that differs by its number."""
    pixels = np.random.default_rng(number).integers(0, 255, (4, 6, 3), np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str) -> bytes:
    """Return an image's file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


MDS_COLUMNS = {
    "Name": "str",
    "array": "ndarray",
    "array_of": "ndarray:int16",
    "block": "ndarray:float32:2,3",
    "count": "int",
    "data": "bytes",
    "dec": "str_decimal",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "i8": "int8",
    "jpeg": "jpeg",
    "jpegs": "list[jpeg]",
    "jpegs2": "jpeg_array",
    "json": "json",
    "pil": "pil",
    "pils": "list[pil]",
    "png": "png",
    "pngs": "list[png]",
    "sf": "str_float",
    "si": "str_int",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "u8": "uint8",
}


def mds_sample(number: int) -> dict[str, Any]:
    """Return a sample with every kind of column."""
    image = picture(number)
    jpeg = Image.open(io.BytesIO(file_of(image, "JPEG")))
    return {
        "Name": f"sämple {number}",
        "array": np.arange(number + 1, dtype=np.uint16).reshape(1, -1),
        "array_of": np.arange(300 if number == 3 else 2, dtype=np.int16),
        "block": np.full((2, 3), number / 7, np.float32),
        "count": -number * 10**12,
        "data": bytes(range(number)),
        "dec": Decimal(number) / 8,
        "f16": number / 3,
        "f32": number / 3,
        "f64": number / 3,
        "i16": -number,
        "i32": -number,
        "i64": -number,
        "i8": -number,
        "jpeg": jpeg,
        "jpegs": [jpeg] * (number % 3),
        "jpegs2": [file_of(image, "JPEG")] * (1 + number % 2),
        "json": {"nested": [number, None, "ä"]},
        "pil": image.convert("L"),
        "pils": [image, image.convert("L")],
        "png": image,
        "pngs": [image],
        "sf": number / 3,
        "si": number * 10**30,
        "u16": number,
        "u32": number,
        "u64": number,
        "u8": number,
    }


def write_mds() -> None:
    """Write MDS sets: plain ones, and compressed ones with one small column."""
    from streaming.base.format.mds.reader import MDSReader
    from streaming.base.format.mds.writer import MDSWriter

    folder = HERE / "mds"
    shutil.rmtree(folder, ignore_errors=True)
    out = str(folder / "plain")
    with MDSWriter(out=out, columns=MDS_COLUMNS, size_limit=9000) as writer:
        for number in range(SAMPLES):
            writer.write(mds_sample(number))
    values = []
    for row in json.loads((folder / "plain/index.json").read_text())["shards"]:
        reader = MDSReader.from_json(out, "", row)
        for number in range(reader.samples):
            sample = reader.decode_sample(reader.get_sample_data(number))
            values.append({name: describe(value) for name, value in sample.items()})
    (folder / "values.json").write_text(json.dumps(values, indent=0))

    for compression in ("zstd", "gz", "bz2", "br", "snappy"):
        out = str(folder / compression)
        with MDSWriter(out=out, columns={"n": "int"}, compression=compression) as writer:
            for number in range(SAMPLES):
                writer.write({"n": number})
    with MDSWriter(out=str(folder / "pickled"), columns={"bad": "pkl", "n": "int"}) as writer:
        for number in range(3):
            writer.write({"bad": {number}, "n": number})


def litdata_sample(number: int) -> dict[str, Any]:
    """Return a sample with many kinds of leaves."""
    import torch

    return {
        "Name": f"sämple {number}",
        "array": np.arange(6, dtype=np.float32).reshape(2, 3) + number,
        "count": -number * 10**12,
        "data": bytes(range(number)),
        "flag": number % 2 == 0,
        "pil": picture(number),
        "share": number / 3,
        "tensor": torch.full((2, 2), number, dtype=torch.int16),
        "tokens": torch.arange(number, dtype=torch.int32),
        "vector": np.arange(number, dtype=np.uint16),
    }


def litdata_row(number: int) -> dict[str, Any]:
    """Return a sample of which LitData makes a row of Arrow's."""
    return {
        "Name": f"sämple {number}",
        "count": -number * 10**12,
        "data": bytes(range(number)),
        "flag": number % 2 == 0,
        "nested": {"list": [number, number + 1], "text": "ä"},
        "share": number / 3,
        "words": ["a"] * number,
    }


def write_litdata() -> None:
    """Write LitData sets: plain, zstd as a whole, tuples, and pickled leaves."""
    from litdata.streaming import Cache

    folder = HERE / "litdata"
    shutil.rmtree(folder, ignore_errors=True)

    def write(name: str, samples: list[Any], **options: Any) -> Cache:
        cache = Cache(str(folder / name), chunk_size=4, **options)
        for number, sample in enumerate(samples):
            cache[number] = sample
        cache.done()
        cache.merge()
        return cache

    cache = write("plain", [litdata_sample(number) for number in range(SAMPLES)])
    values = []
    for number in range(SAMPLES):
        sample = cache[number]
        values.append({name: describe(value) for name, value in sample.items()})
    (folder / "values.json").write_text(json.dumps(values, indent=0))
    cache = write("rows", [litdata_row(number) for number in range(SAMPLES)], compression="zstd")
    values = [
        {name: describe(value) for name, value in cache[number].items()}
        for number in range(SAMPLES)
    ]
    (folder / "rows_values.json").write_text(json.dumps(values, indent=0))
    pairs = [(number, bytes([number])) for number in range(SAMPLES)]
    write("tuples", pairs)
    write("zstd", pairs, compression="zstd", compression_level="chunk")
    arrays = [{"n": number, "v": np.full(3, number, np.uint8)} for number in range(SAMPLES)]
    write("unframed", arrays)
    write("framed", arrays, compression="zstd", compression_batch_size=3)
    write("pickled", [{"bad": {number}, "n": number} for number in range(3)])


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        {"mds": write_mds, "litdata": write_litdata}[kind]()
