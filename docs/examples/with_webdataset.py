"""A script written for webdataset: one import is another.

torchrun --nproc-per-node 2 with_webdataset.py 's3://bucket/train-{000000..000999}.tar'
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import webdataset as wds
from torch.nn.parallel import DistributedDataParallel
from toy import BATCH, EPOCHS, arguments, decode, loss_of, model, report

from shardcache_client.webdataset import WebDataset  # was: from webdataset import WebDataset


def main() -> None:
    """Train on what the command line names."""
    args = arguments()
    dist.init_process_group("gloo")
    dataset = (
        # batch_size, new here, lets workers' shares be whole batches; socket is for a daemon in an unusual place.
        WebDataset(args.urls, shardshuffle=100, nodesplitter=wds.split_by_node, batch_size=BATCH, socket=args.socket)
        .shuffle(50)
        .map(decode)
        .batched(BATCH)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
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
