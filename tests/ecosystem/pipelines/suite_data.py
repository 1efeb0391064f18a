"""The data that webdataset's test suite reads, small, and made as its tests describe them."""

import gzip
import io
import json
import random
from pathlib import Path

import numpy as np
from PIL import Image
from webdataset import tenbin

from support.shards.tars import Sample, make_tar

SHARDS = (0, 1, 2, 3, 321)
IMAGES = 30


def make_suite_data(local: Path, remote: Path) -> None:
    """Write what the tests open by path into `local`, and what they fetch by HTTP into `remote`."""
    (local / "imagenet-000000.tgz").write_bytes(
        gzip.compress(make_tar(map(_labelled, range(47))), 1)
    )
    (local / "compressed.tar").write_bytes(
        make_tar([{"__key__": "0", "txt.gz": gzip.compress(b"hello\n")}])
    )
    pair = [np.zeros((28, 28)), np.ones((28, 28))]
    tensors = [
        {"__key__": f"{number}", "ten": bytes(tenbin.encode_buffer(pair))} for number in range(100)
    ]
    (local / "tendata.tar").write_bytes(make_tar(tensors))
    (remote / "sample.tgz").write_bytes(
        gzip.compress(make_tar([{"__key__": "10", "cls": b"0", "png": _image("PNG")}]))
    )
    for shard in SHARDS:
        captions = make_tar(_captioned(shard, number) for number in range(IMAGES))
        (remote / f"openimages-train-{shard:06d}.tar").write_bytes(captions)


def _labelled(number: int) -> Sample:
    size = (600, 793) if number == 0 else (60, 40)  # of the first image, the tests know the size
    # Tests that cut the compressed shard want it longer than 10 KiB.
    noise = random.Random(number).randbytes(2000)
    return {
        "__key__": f"{number:04d}",
        "cls": b"%d" % number,
        "png": _image("PNG", size),
        "wnid": b"n1",
        "xml": noise,
    }


def _captioned(shard: int, number: int) -> Sample:
    return {
        "__key__": f"{shard:04d}{number:04d}",
        "jpg": _image("JPEG"),
        "json": json.dumps([number]).encode(),
    }


def _image(format_: str, size: tuple[int, int] = (40, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, "orange").save(buffer, format_)
    return buffer.getvalue()
