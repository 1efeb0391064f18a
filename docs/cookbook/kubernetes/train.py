"""A training job of several pods, which the daemon of their node serves."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardcache_client import ShardDataset

BATCH = 16
EPOCHS = 3
URLS = "shards/index.json"


def main() -> None:
    """Train on two classes of points."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    dataset = ShardDataset(URLS, shuffle=True, seed=7, decode={"npy": "numpy", "cls": int})
    loader = dataset.loader(batch_size=BATCH, num_workers=2)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    right = torch.zeros(2, dtype=torch.long)
    for _ in range(EPOCHS):
        right.zero_()
        for batch in loader:
            logits = model(torch.as_tensor(batch["npy"]))
            loss = nn.functional.cross_entropy(logits, batch["cls"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += torch.tensor([int((logits.argmax(1) == batch["cls"]).sum()), len(logits)])
        dist.all_reduce(right)
    if dist.get_rank() == 0:
        print("it learned" if right[0] > 0.9 * right[1] else f"it did not learn: {right.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
