"""A training script for `test_batch_by_length`: trains in step with the other ranks and writes down what it saw.

    python length_job.py SOCKET URLS OUT_FOLDER STEPS

The first epoch is read to its end; the second one is left after STEPS and gone on with by another loader. The first
loader forks its workers, the other spawns them.
"""

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache_client import ShardDataset
from shardcache_client.lengths import LengthBatches, batch_by_length

MAX_TOKENS = 600


def length(sample: dict[str, Any]) -> int:
    """Return the bytes of the text."""
    return len(sample["txt"])


def told(samples: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return what is written down of a batch: each sample's key and length."""
    return [(sample["__key__"], length(sample)) for sample in samples]


def batches(socket: str, urls: str) -> LengthBatches:
    """Return what all loaders of this test read."""
    ds = ShardDataset(urls, shuffle=True, seed=7, socket=socket, job="length-job")
    return batch_by_length(ds, MAX_TOKENS, length, sort_buffer=40, collate=told, timeout_s=30)


def train(loader: Iterable[Any], steps: int | None = None) -> list[Any]:
    """Take batches as a training loop does: no rank begins a step before all have begun the one before."""
    taken = []
    for batch in islice(loader, steps):
        taken.append(batch)
        torch.distributed.all_reduce(torch.ones(1))
    return taken


def main() -> None:
    """Run the job."""
    socket, urls, out, steps = sys.argv[1:]
    torch.distributed.init_process_group("gloo")

    def loader(start_method: str) -> Any:
        return StatefulDataLoader(
            batches(socket, urls), batch_size=None, num_workers=2, multiprocessing_context=start_method
        )

    first = loader("fork")
    seen: dict[str, Any] = {"whole": train(first)}
    seen["begun"] = train(first, int(steps))
    seen["state"] = first.state_dict()
    second = loader("spawn")
    second.load_state_dict(seen["state"])
    seen["rest"] = train(second)
    torch.distributed.barrier()
    (Path(out) / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
