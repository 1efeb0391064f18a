"""The demo's dataset: small JPEG images of shapes in tar shards, generated on each run."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "stripes")
# Uneven, as in practice: neither the shards' samples nor their sum are divisible by the number of ranks or workers.
IMAGES_OF_SHARDS = (31, 64, 52, 40, 71, 48, 25, 59, 44, 66, 37, 40)
PIXELS = 64


@dataclass(frozen=True, slots=True)
class TarShard:
    """A shard to upload: its name, its bytes and its samples' keys."""

    name: str
    body: bytes
    keys: tuple[str, ...]


def draw_shards() -> Iterator[TarShard]:
    """Yield the shards; each sample consists of `<key>.jpg` and `<key>.cls`, with a key unique in the dataset."""
    rng = random.Random(0)
    for number, images in enumerate(IMAGES_OF_SHARDS):
        keys = [f"{number:02d}-{index:03d}" for index in range(images)]
        yield TarShard(f"train-{number:04d}.tar", _tar(keys, rng), tuple(keys))


def _tar(keys: list[str], rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for key in keys:
            label = rng.randrange(len(SHAPES))
            _add(tar, f"{key}.jpg", _jpeg(SHAPES[label], rng))
            _add(tar, f"{key}.cls", str(label).encode())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, body: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(body)
    tar.addfile(member, io.BytesIO(body))


def _jpeg(shape: str, rng: random.Random) -> bytes:
    image = Image.new("RGB", (PIXELS, PIXELS), _colour(rng, 0, 90))
    radius = rng.randint(PIXELS // 6, PIXELS // 3)
    x, y = (rng.randint(radius, PIXELS - radius) for _ in range(2))
    draw = ImageDraw.Draw(image)
    ink = _colour(rng, 140, 255)
    match shape:
        case "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=ink)
        case "square":
            draw.rectangle((x - radius, y - radius, x + radius, y + radius), fill=ink)
        case "stripes":
            for offset in range(-radius, radius, 6):
                draw.line((x - radius, y + offset, x + radius, y + offset), fill=ink, width=2)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _colour(rng: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)
