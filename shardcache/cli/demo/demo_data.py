"""Data of the demo and of the documentation: small JPEG drawings of shapes, and shards of them.

The numbers and keys of the samples are the same on every machine, so that the documentation's pages
can show the output of a script.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

# Number of corners of each shape. A polygon with 30 corners looks like a circle.
SHAPES = {
    "circle": 30,
    "square": 4,
    "triangle": 3,
}
PHOTOS = 600  # number of files in `photos/`
# Number of samples in each shard of `train/` and `val/`.
TRAINING = (25, 25, 25, 25)
VALIDATION = (4, 7)
LINES = 2_000  # number of lines in `lines.txt`

_SIDES = (96, 128, 160)  # widths and heights of photos, in pixels
_SAMPLE_PIXELS = 16
_CLASSES = 10


def draw_shape(shape: str, rng: random.Random, width: int, height: int) -> bytes:
    """Draw a shape at a random place in a picture; return the JPEG file.

    Args:
        shape: a key of `SHAPES`.
        rng: source of random numbers, which also decides colours and size.
        width: width of the picture in pixels.
        height: height of the picture in pixels.
    """
    from PIL import Image, ImageDraw

    def colour(low: int, high: int) -> tuple[int, int, int]:
        return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)

    dark = colour(0, 90)
    image = Image.new("RGB", (width, height), dark)
    side = min(width, height)
    radius = rng.randint(side // 6, side // 3)
    x = rng.randint(radius, width - radius)
    y = rng.randint(radius, height - radius)
    bounding_circle = (x, y, radius)
    bright = colour(140, 255)
    ImageDraw.Draw(image).regular_polygon(bounding_circle, SHAPES[shape], fill=bright)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def write_data(folder: Path) -> None:
    """Write the data of the documentation's pages into a new or empty folder.

    `photos/` has a folder of JPEG files for each class. `train/` and `val/` have shards and their
    index; their samples have a `jpg`, a `txt` and a `cls`. `captions/` has shards with only the
    `txt` of the same samples. `lines.txt` is a file of text lines.
    """
    rng = random.Random(0)
    _write_photos(folder / "photos", rng)
    for name, counts in (("train", TRAINING), ("val", VALIDATION)):
        samples = [_sample(number, rng) for number in range(sum(counts))]
        captions = [{"__key__": sample["__key__"], "txt": sample["txt"]} for sample in samples]
        _write_shards(folder / name, "{:06d}.tar", samples, counts)
        _write_index(folder / name, counts)
        _write_shards(folder / "captions", name + "-{:06d}.tar", captions, counts)
    lines = (f"line {number}\n" for number in range(LINES))
    (folder / "lines.txt").write_text("".join(lines))


def _write_photos(folder: Path, rng: random.Random) -> None:
    """Write JPEG files of random shapes and sizes, `<shape>/<number>.jpg`."""
    for shape in SHAPES:
        (folder / shape).mkdir(parents=True)
    for number in range(PHOTOS):
        shape = rng.choice(list(SHAPES))
        picture = draw_shape(shape, rng, rng.choice(_SIDES), rng.choice(_SIDES))
        (folder / shape / f"{number:03d}.jpg").write_bytes(picture)


def _sample(number: int, rng: random.Random) -> dict[str, bytes]:
    """Return the sample with a number: its key, and a value for each extension."""
    shape = list(SHAPES)[number % len(SHAPES)]
    return {
        "__key__": f"{number:06d}".encode(),
        "jpg": draw_shape(shape, rng, _SAMPLE_PIXELS, _SAMPLE_PIXELS),
        "txt": b"a photo",
        "cls": str(number % _CLASSES).encode(),
    }


def _write_shards(
    folder: Path,
    name_format: str,
    samples: Sequence[Mapping[str, bytes]],
    counts: Iterable[int],
) -> None:
    """Write samples to shards in a folder.

    Args:
        folder: the folder.
        name_format: format string of the shards' names, with their number.
        samples: the samples of all shards.
        counts: number of samples in each shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bounds = accumulate(counts, initial=0)
    for shard, (start, stop) in enumerate(pairwise(bounds)):
        file = folder / name_format.format(shard)
        with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
            for sample in samples[start:stop]:
                _add_sample(tar, sample)


def _add_sample(tar: tarfile.TarFile, sample: Mapping[str, bytes]) -> None:
    """Add a sample to a shard: a member for each of its values, named by key and extension."""
    members = dict(sample)
    key = members.pop("__key__").decode()
    for extension, data in members.items():
        info = tarfile.TarInfo(f"{key}.{extension}")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def _write_index(folder: Path, counts: Sequence[int]) -> None:
    """Write the index of shards that have these numbers of samples, in wids's format."""
    rows = [{"url": f"{shard:06d}.tar", "nsamples": count} for shard, count in enumerate(counts)]
    index = {"wids_version": 1, "shardlist": rows}
    (folder / "index.json").write_text(json.dumps(index))
