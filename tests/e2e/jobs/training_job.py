"""A training script for `test_jobs`: reads two epochs and writes down which samples each of its processes saw.

    python training_job.py SOCKET URLS OUT_FOLDER START_METHOD [RENDEZVOUS_FILE RANK WORLD_SIZE]

With a rendezvous file torch.distributed is the only one who knows the ranks; without, a launcher's variables are.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset


def main() -> None:
    """Run the job."""
    socket, urls, out, start_method, *rendezvous = sys.argv[1:]
    if rendezvous:
        path, rank, world_size = rendezvous
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{path}", rank=int(rank), world_size=int(world_size)
        )
    ds = ShardDataset(urls, shuffle=True, shuffle_window=2, seed=7, socket=socket, job="test-job")
    loader = DataLoader(
        ds, batch_size=None, num_workers=2, multiprocessing_context=start_method, persistent_workers=True
    )
    epochs = [[sample["__key__"] for sample in loader] for _ in range(2)]
    (Path(out) / f"{os.getpid()}.json").write_text(json.dumps(epochs))
    if rendezvous:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
