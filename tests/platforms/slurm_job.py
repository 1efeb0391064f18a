"""A task of a job for `test_slurm` that reads two epochs by Slurm's ranks and notes the keys.

    python slurm_job.py URLS OUT_FOLDER [hold]

With `hold` it stops at its first sample, the shard in its hands.
"""

import json
import os
import signal
import sys
from pathlib import Path

from shardcache_client.dataset import ShardDataset


def main() -> None:
    urls, out, *hold = sys.argv[1:]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)  # Slurm's own variables have to do
    report = Path(out) / os.environ["SLURM_PROCID"]
    dataset = ShardDataset(urls, shuffle=True, shuffle_window=2, seed=7)
    if hold:
        samples = iter(dataset)
        report.write_text(next(samples)["__key__"])
        signal.pause()
    report.write_text(json.dumps([[sample["__key__"] for sample in dataset] for _ in range(2)]))


if __name__ == "__main__":
    main()
