"""`ShardLoader.stats`: what takes the time of an epoch has the largest share of it."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import KEYS, Make, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def work(value: Any, rounds: int = 100_000) -> Any:
    """Return a batch, after more work than anything else here needs."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    return value


def work_on_sample(value: Any) -> Any:
    return work(value, 25_000)


def keys_after_work(samples: Any) -> list[str]:
    return keys_of(work(samples))


def read(loader: Any, step: Any = lambda batch: batch) -> dict[str, float]:
    """Read an epoch and return the shares of its time."""
    for batch in loader:
        step(batch)
    shares: dict[str, float] = loader.stats()["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    return shares


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow", ["decoding", pytest.param("collating", marks=pytest.mark.slow), "step"])
def test_the_slowest_stage_has_the_largest_share(
    make: Make, caplog: pytest.LogCaptureFixture, workers: int, slow: str
) -> None:
    """With workers and without; the log has one line for each epoch, but none for a look."""
    dataset = make(decode=work_on_sample if slow == "decoding" else None)
    loader = dataset.loader(collate_fn=keys_after_work if slow == "collating" else keys_of, num_workers=workers)
    with caplog.at_level(logging.INFO, "shardcache"):
        next(iter(loader))
        read(loader)  # starts the workers
        shares = read(loader, *[work] * (slow == "step"))
    stats = loader.stats()
    next(iter(loader))
    assert loader.stats() == stats
    assert max(shares, key=lambda name: shares[name]) == slow, shares
    assert (stats["epoch"], stats["batches"], stats["samples"]) == (1, 12, len(KEYS))
    lines = [line for line in caplog.messages if " samples/s" in line]
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_slow_store_is_waited_for(folder: Path, tmp_path: Path, workers: int) -> None:
    """As is one of which only a little arrives per second."""
    write_shards(tmp_path, 4, 2, {"jpg": 100_000})
    place = folder / f"slow-{workers}"
    place.mkdir()
    with Daemon(place, "--max-bandwidth", "600kB") as daemon:
        dataset = ShardDataset(f"file://{tmp_path}/shard-{{000000..000003}}.tar", batch_size=2, socket=daemon.socket)
        shares = read(dataset.loader(num_workers=workers, collate_fn=keys_of))
    # The start of processes counts as handover, and may take a busy machine longer than the store.
    stages = {name: share for name, share in shares.items() if name != "handover" or not workers}
    assert max(stages, key=lambda name: stages[name]) == "shards", shares
