"""Ray Data: two epochs of samples, the second from the caches of the nodes, each of which has a daemon.

python with_ray_data.py 's3://bucket/train-{000000..000999}.tar'
"""

import argparse
from typing import Any

import ray

from shardcache_client.ray import read_shards


def decode(row: dict[str, Any]) -> dict[str, Any]:
    """Return the class, and the size of the image: a model would take its pixels."""
    return {"label": int(row["cls"]), "size_bytes": len(row["jpg"])}


def main() -> None:
    """Read the shards that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    args = parser.parse_args()
    ray.init()
    for epoch in range(2):
        labels = [int(label) for batch in read_shards(args.urls).map(decode).iter_batches() for label in batch["label"]]
        print(f"epoch {epoch}: {len(labels)} samples, labels from {min(labels)} to {max(labels)}")


if __name__ == "__main__":
    main()
