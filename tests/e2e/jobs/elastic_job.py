"""A rank of an elastic job for `test_launchers`: torchrun restarts its ranks whenever one of them is killed.

    torchrun … elastic_job.py SOCKET URLS OUT_FOLDER

The ranks gather the keys of each step over a process group, and rank 0 saves them with the loader's state. In the first
two attempts one rank kills itself late in the first epoch; two workers per rank outlive it for a moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from shardcache_client import ShardDataset

BATCH, EPOCHS = 4, 2
KILLED_AT = {0: (1, 4), 1: (0, 6)}  # attempt: rank, and the step of the epoch after which it is killed


def main() -> None:
    """Be one rank."""
    daemon, urls, out = sys.argv[1:]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = ShardDataset(urls, shuffle=True, seed=7, batch_size=BATCH, socket=daemon).loader(
        num_workers=2, collate_fn=list
    )
    saved = Path(out, "job.json")
    job = json.loads(saved.read_text()) if saved.exists() else {"read": [], "step": 0}
    if "state" in job:
        loader.load_state_dict(job["state"])
    read, first = job["read"], loader.epoch
    for epoch in range(first, EPOCHS):
        done = job["step"] if epoch == first else 0
        for step, batch in enumerate(loader, done + 1):
            keys = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(keys, [sample["__key__"] for sample in batch])
            read += [[epoch, key] for keys_of_rank in keys for key in keys_of_rank]
            if rank == 0:
                temporary = saved.with_suffix(".new")
                temporary.write_text(json.dumps({"read": read, "step": step, "state": loader.state_dict()}))
                temporary.replace(saved)
            if KILLED_AT.get(attempt) == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
