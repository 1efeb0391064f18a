"""Weights: several processes load a model from the node's cache; one of them takes a single tensor."""

import os

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from shardcache_client import cached_paths

URLS = os.environ.get("MODEL", "model/model-{00001..00004}-of-00004.safetensors")


def main() -> None:
    """Load all weights on each rank, and compare."""
    dist.init_process_group("gloo")
    # The files are mapped from the cache: the ranks share its memory, and the store is asked once.
    with cached_paths(URLS) as paths:
        weights = {}
        for path in paths:
            weights |= load_file(path)
        with safe_open(paths[-1], framework="pt") as file:
            one = file.get_tensor("layers.31.weight")
    total = torch.stack([weight.double().sum() for weight in weights.values()]).sum()
    totals = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    if dist.get_rank() == 0:
        same = all(torch.equal(each, total) for each in totals)
        print(f"{len(weights)} tensors, {'the same' if same else 'DIFFERENT'} on {len(totals)} ranks")
        print(f"one of them alone: {tuple(one.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
