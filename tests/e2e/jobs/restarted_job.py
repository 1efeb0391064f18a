"""A rank of a job for `test_launchers` that torchrun starts anew when one of its ranks is killed.

    torchrun … restarted_job.py SOCKET URLS OUT_FOLDER

Rank 1 kills itself in the second epoch, once rank 0 has a state to go on from: the ranks train on nothing together,
so nothing else holds one back until the other has read its first batch. Each rank saves what it has read, and its
state, after every batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from shardcache_client import ShardDataset

BATCH, EPOCHS = 5, 2


def main() -> None:
    """Be one rank."""
    daemon, urls, out = sys.argv[1:]
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dataset = ShardDataset(urls, shuffle=True, seed=7, batch_size=BATCH, socket=daemon)
    loader: Any = dataset.loader(num_workers=1, collate_fn=list)
    saved = Path(out, f"{rank}.json")
    read: list[list[str]] = [[]]
    if attempt:
        told = json.loads(saved.read_text())
        read = told["read"]
        loader.load_state_dict(told["state"])
        read += [[] for _ in range(len(read), loader.epoch + 1)]  # it had read an epoch to its end
    while len(read) <= EPOCHS:
        for taken, batch in enumerate(loader, 1):
            read[-1] += [sample["__key__"] for sample in batch]
            temporary = saved.with_suffix(".new")
            temporary.write_text(json.dumps({"read": read, "state": loader.state_dict()}))
            temporary.replace(saved)
            if rank and not attempt and len(read) == EPOCHS and taken == 3:
                while not Path(out, "0.json").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        read.append([])


if __name__ == "__main__":
    main()
