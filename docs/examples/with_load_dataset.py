"""Hugging Face datasets' own reader of WebDataset tars, over shards that stay cached while it reads them.

RANK=0 WORLD_SIZE=2 python with_load_dataset.py 's3://bucket/{000..099}.tar'

Order, shuffling, sharding and states are those of datasets: by shard, with a shuffle buffer.
"""

from __future__ import annotations

import os

from datasets import Image, load_dataset
from datasets.distributed import split_dataset_by_node
from toy_numpy import BATCH, EPOCHS, arguments, report

from shardcache_client import cached_paths


def main() -> None:
    """Read what the command line names."""
    args = arguments()
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
