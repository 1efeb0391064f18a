"""torchdata.nodes: a pipeline of nodes over the dataset, saved and resumed in the middle of an epoch.

torchrun --nproc-per-node 2 with_torchdata_nodes.py 's3://bucket/index.json' --checkpoints DIR
torchrun --nproc-per-node 2 with_torchdata_nodes.py 's3://bucket/index.json' --resume DIR/step-9.pt
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate
from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper, Prefetcher
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client import ShardDataset


def main() -> None:
    """Train on what the command line names."""
    args = arguments("--checkpoints", "--resume")
    dist.init_process_group("gloo")
    dataset = ShardDataset(args.urls, shuffle=True, seed=7, batch_size=BATCH, socket=args.socket)
    # Threads decode: the dataset itself stays in this process, and IterableWrapper saves its state.
    samples = ParallelMapper(IterableWrapper(dataset), decode, num_workers=4)
    loader = Loader(Prefetcher(Mapper(Batcher(samples, BATCH, drop_last=False), default_collate), prefetch_factor=2))
    if args.resume:
        loader.load_state_dict(torch.load(args.resume, weights_only=True))
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = 0
    batches = iter(loader)  # restores the dataset's state, and with it the epoch
    first = dataset.epoch
    for epoch in range(first, EPOCHS):
        if epoch > first:
            batches = iter(loader)  # not beyond the last epoch: threads would still be reading when the process exits
        shown = []
        for batch in batches:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            shown.append(batch["key"])
            step += 1
            if args.checkpoints and dist.get_rank() == 0:  # its state speaks for all
                torch.save(loader.state_dict(), f"{args.checkpoints}/step-{step}.pt")
        report(f"epoch {epoch}", shown, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
