"""Plain PyTorch over several processes.

torchrun --nproc-per-node 2 with_torchrun.py 's3://bucket/train-{000000..000999}.tar'
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client import ShardDataset


def main() -> None:
    """Train on what the command line names."""
    args = arguments()
    dist.init_process_group("gloo")
    dataset = ShardDataset(args.urls, shuffle=True, seed=7, batch_size=BATCH, decode=decode, socket=args.socket)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=2, persistent_workers=True)
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        shown = []
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            shown.append(batch["key"])
        report(f"epoch {epoch}", shown, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
