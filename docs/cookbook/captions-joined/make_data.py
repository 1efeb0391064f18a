"""Write shards of images, and their captions as a parquet file in another order."""

import io
import random

import pyarrow
from PIL import Image
from pyarrow import parquet

from shardcache.writing import ShardWriter

COLORS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 230), "white": (250, 250, 250)}
SAMPLES = 128


def jpeg(color: tuple[int, int, int]) -> bytes:
    """Return an image of one color."""
    data = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(data, "jpeg")
    return data.getvalue()


def main() -> None:
    """Write all; the same in each run."""
    dice = random.Random(7)
    rows = []
    with ShardWriter("shards/", shard_size_bytes=32 * 1024) as shards:
        for number in range(SAMPLES):
            name = dice.choice(list(COLORS))
            shards.write({"__key__": f"{number:06d}", "jpg": jpeg(COLORS[name])})
            rows.append({"key": f"{number:06d}", "caption": f"a {name} picture", "score": dice.random()})
    dice.shuffle(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), "captions.parquet")


if __name__ == "__main__":
    main()
