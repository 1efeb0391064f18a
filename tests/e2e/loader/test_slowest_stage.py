"""`ShardLoader.stats`: what takes the time of an epoch has the largest share of it."""

import hashlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import KEYS, Make, write_shards
from support.stores.throttled_s3 import ThrottledS3

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


TIMES = (1, 10)
"""Amounts of work in the slow stage, as the others may take as long on a busy machine."""


def work(value: Any, rounds: int) -> Any:
    """Return a batch or a sample, after more work than anything else here needs."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
    return value


def keys_after_work(samples: Any, rounds: int) -> list[str]:
    return keys_of(work(samples, rounds))


def largest(shares: dict[str, float]) -> str:
    return max(shares, key=lambda name: shares[name])


def read(loader: Any, step: Any = lambda batch: batch) -> dict[str, float]:
    """Read an epoch and return the shares of its time."""
    for batch in loader:
        step(batch)
    shares: dict[str, float] = loader.stats()["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    return shares


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow", first_quick(["step", "decoding", "collating"]))
def test_the_slowest_stage_has_the_largest_share(
    make: Make, caplog: pytest.LogCaptureFixture, workers: int, slow: str
) -> None:
    """The log has one line for each epoch and none for a look, with workers and without."""
    for times in TIMES:
        work_on_batch = partial(work, rounds=times * 100_000)
        work_on_sample = partial(work, rounds=times * 25_000)
        keys_after = partial(keys_after_work, rounds=times * 100_000)
        dataset = make(decode=work_on_sample if slow == "decoding" else None)
        loader = dataset.loader(
            collate_fn=keys_after if slow == "collating" else keys_of, num_workers=workers
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, "shardcache"):
            next(iter(loader))
            read(loader)  # starts the workers
            shares = read(loader, *[work_on_batch] * (slow == "step"))
        if largest(shares) == slow:
            break
    stats = loader.stats()
    next(iter(loader))
    assert loader.stats() == stats
    assert largest(shares) == slow, shares
    assert stats["epoch"] == 1
    assert stats["batches"] == 12
    assert stats["samples"] == len(KEYS)
    lines = [line for line in caplog.messages if " samples/s" in line]
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_slow_store_is_waited_for(folder: Path, tmp_path: Path, workers: int) -> None:
    """As is one of which only a little arrives per second."""
    (tmp_path / "bucket").mkdir()
    write_shards(tmp_path / "bucket", 4, 2, {"jpg": 100_000})
    urls = "s3://bucket/shard-{000000..000003}.tar"
    for times in TIMES:
        place = folder / f"slow-{workers}-{times}"
        place.mkdir()
        with (
            ThrottledS3(tmp_path, total_bytes_per_s=700_000 / times) as store,
            Daemon(place, env=store.env()) as daemon,
        ):
            dataset = ShardDataset(urls, batch_size=2, socket=daemon.socket)
            shares = read(dataset.loader(num_workers=workers, collate_fn=keys_of))
        if largest(shares) == "shards":
            break
    assert largest(shares) == "shards", shares
