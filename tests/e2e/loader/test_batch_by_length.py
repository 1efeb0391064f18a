"""Batches by length over real ranks, workers and shards: equally many everywhere, resumed exactly, also elsewhere."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from length_job import MAX_TOKENS, batches
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar

SCRIPT = Path(__file__).with_name("length_job.py")
SAMPLES = 400
STEPS = 9


@pytest.fixture(scope="module")
def texts(folder: Path, daemon: Daemon) -> str:
    """The pattern of eight shards of texts, longer from shard to shard; the daemon has counted them."""
    source = folder / "texts"
    source.mkdir()
    draw = random.Random(7)
    for number in range(8):
        samples = [
            {"__key__": f"{key:06d}", "txt": b"x" * min(1 + int(draw.lognormvariate(3 + number / 8, 0.7)), MAX_TOKENS)}
            for key in range(number * SAMPLES // 8, (number + 1) * SAMPLES // 8)
        ]
        (source / f"{number}.tar").write_bytes(make_tar(samples))
    urls = f"file://{source}/{{0..7}}.tar"
    assert len(list(ShardDataset(urls, socket=daemon.socket))) == SAMPLES
    return urls


def torchrun(*arguments: str) -> list[dict[str, Any]]:
    """Run the job with two ranks; return what each wrote down."""
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in names} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    done = subprocess.run(
        [*command, *arguments, str(STEPS)], env=env, capture_output=True, text=True, timeout=GUARD_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((Path(arguments[2]) / f"{rank}.json").read_text()) for rank in range(2)]


def keys(*parts: list[Any]) -> list[str]:
    """Return the keys of all samples, sorted."""
    return sorted(key for part in parts for batch in part for key, _ in batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has processors
def test_ranks_train_in_step_and_resume_exactly(daemon: Daemon, texts: str, tmp_path: Path) -> None:
    """Two ranks of two workers get equally many batches and each sample once, over a whole epoch and a resumed one.

    What was left is also read once by one rank with three workers, given the states of both ranks.
    """
    ranks = torchrun(str(daemon.socket), texts, str(tmp_path))
    everything = [f"{number:06d}" for number in range(SAMPLES)]
    assert len({len(rank["whole"]) for rank in ranks}) == 1
    assert keys(*(rank["whole"] for rank in ranks)) == everything
    for rank in ranks:
        for batch in rank["whole"]:
            assert len(batch) * max(length for _, length in batch) <= MAX_TOKENS
    assert len({len(rank["rest"]) for rank in ranks}) == 1
    begun = keys(*(rank["begun"] for rank in ranks))
    assert len(begun) > STEPS
    assert keys(*(rank[part] for rank in ranks for part in ("begun", "rest"))) == everything
    other = batches(str(daemon.socket), texts)
    other.load_state_dict([rank["state"] for rank in ranks])
    assert sorted(begun + keys(list(DataLoader(other, batch_size=None, num_workers=3)))) == everything
