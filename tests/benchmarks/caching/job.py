"""A training job without a model; prints its samples: `python -m benchmarks.caching.job URL SOCKET NAME EPOCHS`."""

from __future__ import annotations

import json
import sys

from torch.utils.data import DataLoader

from shardcache_client import ShardDataset


def main() -> None:
    """Read every epoch through a loader with two workers."""
    url, socket, name, epochs = sys.argv[1:]
    dataset = ShardDataset(url, shuffle=True, seed=7, job=name, socket=socket)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    keys: list[str] = []
    for epoch in range(int(epochs)):
        dataset.set_epoch(epoch)
        keys += [sample["__key__"] for sample in loader]
    print(json.dumps({"samples": len(keys), "distinct": len(set(keys))}))


if __name__ == "__main__":
    main()
