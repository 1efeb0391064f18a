"""Write shards of points with a class: 1,001 of them, a number that no number of ranks divides."""

import random

import numpy as np

from shardcache.writing import ShardWriter

SAMPLES = 1_001


def main() -> None:
    """Write all; the same in each run."""
    dice = random.Random(7)
    with ShardWriter("shards/", shard_size_bytes=256 * 1024) as shards:
        for number in range(SAMPLES):
            point = np.array([dice.uniform(-1, 1), dice.uniform(-1, 1)], dtype=np.float32)
            shards.write({"__key__": f"{number:06d}", "npy": point, "cls": int(point.sum() > 0)})


if __name__ == "__main__":
    main()
