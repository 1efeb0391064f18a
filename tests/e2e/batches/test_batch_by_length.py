"""Batches by length over real ranks, workers and shards: equally many, and resumed exactly."""

import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import ones
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache_client.dataset import ShardDataset
from shardcache_client.lengths import LengthBatches, batch_by_length
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.ranks import torchrun
from support.shards.tars import make_tar

SAMPLES = 400
STEPS = 9
MAX_TOKENS = 600
KEYS = [f"{number:06d}" for number in range(SAMPLES)]


@pytest.fixture(scope="module")
def texts(folder: Path, daemon: Daemon) -> str:
    """The pattern of eight shards of texts of rising length, which the daemon has counted."""
    source = folder / "texts"
    source.mkdir()
    draw = random.Random(7)
    for number in range(8):
        samples = [
            {
                "__key__": key,
                "txt": b"x" * min(1 + int(draw.lognormvariate(3 + number / 8, 0.7)), MAX_TOKENS),
            }
            for key in KEYS[number * SAMPLES // 8 : (number + 1) * SAMPLES // 8]
        ]
        (source / f"{number}.tar").write_bytes(make_tar(samples))
    urls = f"file://{source}/{{0..7}}.tar"
    assert len(list(ShardDataset(urls, socket=daemon.socket))) == SAMPLES
    return urls


def length(sample: dict[str, Any]) -> int:
    """Return the bytes of the text."""
    return len(sample["txt"])


def described(samples: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return each sample's key and length."""
    return [(sample["__key__"], length(sample)) for sample in samples]


def batches(socket: object, urls: str) -> LengthBatches:
    """Return what all loaders of this test read."""
    ds = ShardDataset(urls, shuffle=True, seed=7, socket=str(socket), job="length-job")
    return batch_by_length(
        ds, MAX_TOKENS, length, sort_buffer=40, collate=described, timeout_s=GUARD_S
    )


def train(socket: str, urls: str) -> dict[str, Any]:
    """Be one rank: read an epoch by forked workers, and resume another by spawned ones."""
    dist.init_process_group("gloo")

    def loader(start_method: str) -> Any:
        loaded = batches(socket, urls)
        return StatefulDataLoader(
            loaded, batch_size=None, num_workers=2, multiprocessing_context=start_method
        )

    def read(loader: Iterable[Any], steps: int | None = None) -> list[Any]:
        taken = []
        for batch in islice(loader, steps):
            taken.append(batch)
            dist.all_reduce(ones(1))  # no rank begins a step before all have begun the one before
        return taken

    first = loader("fork")
    second = loader("spawn")
    seen: dict[str, Any] = {
        "whole": read(first),
        "begun": read(first, STEPS),
        "state": first.state_dict(),
    }
    second.load_state_dict(seen["state"])
    return seen | {"rest": read(second)}


def keys(*parts: list[Any]) -> list[str]:
    """Return the keys of all samples, sorted."""
    return sorted(key for part in parts for batch in part for key, _ in batch)


@pytest.mark.slow
# The loader has more workers than this machine has processors.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_ranks_train_in_step_and_resume_exactly(daemon: Daemon, texts: str) -> None:
    """Two ranks get equally many batches and each sample once, in a whole epoch and a resumed one.

    What was left is also read once by one rank with three workers, given the states of both ranks.
    """
    ranks = torchrun(train, daemon.socket, texts)
    assert len({len(rank["whole"]) for rank in ranks}) == 1
    assert keys(*(rank["whole"] for rank in ranks)) == KEYS
    for rank in ranks:
        for batch in rank["whole"]:
            assert len(batch) * max(length for _, length in batch) <= MAX_TOKENS
    assert len({len(rank["rest"]) for rank in ranks}) == 1
    begun = keys(*(rank["begun"] for rank in ranks))
    assert len(begun) > STEPS
    assert keys(*(rank[part] for rank in ranks for part in ("begun", "rest"))) == KEYS
    other = batches(daemon.socket, texts)
    other.load_state_dict([rank["state"] for rank in ranks])
    assert sorted(begun + keys(list(DataLoader(other, batch_size=None, num_workers=3)))) == KEYS
