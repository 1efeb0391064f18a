"""Hugging Face datasets' own reader of WebDataset tars, over shards that stay cached while it reads them.

python with_load_dataset.py s3://bucket/train/

RANK and WORLD_SIZE say which of several processes this is. Order, shuffling, sharding and states are those of datasets:
by shard, with a shuffle buffer.
"""

import argparse
import json
import os

from datasets import Image, load_dataset
from datasets.distributed import split_dataset_by_node

from shardcache_client.files.paths import cached_paths

BATCH = 4
EPOCHS = 3


def report(name: str, batches: list[list[str]], out: str | None) -> None:
    """Print the number of this process's batches; add their keys to a file, if one is named."""
    print(f"{name}: {len(batches)} batches", flush=True)
    if out:
        with open(out, "a") as file:
            print(json.dumps({"name": name, "rank": 0, "batches": batches}), file=file)


def main() -> None:
    """Read what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", help="shards of samples with a jpg and a cls")
    for option in ("--socket", "--out"):
        parser.add_argument(option)
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with cached_paths(args.urls, socket=args.socket) as paths:
        dataset = load_dataset("webdataset", data_files=paths, split="train", streaming=True)
        dataset = dataset.cast_column("jpg", Image(decode=True)).shuffle(seed=7, buffer_size=20)
        dataset = split_dataset_by_node(dataset, rank, world_size)
        for epoch in range(EPOCHS):
            dataset.set_epoch(epoch)
            report(f"epoch {epoch}", [batch["__key__"] for batch in dataset.iter(BATCH)], args.out)


if __name__ == "__main__":
    main()
