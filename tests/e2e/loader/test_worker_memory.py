"""Memory freed in DataLoader workers stays for the next batch; other processes keep theirs."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache_client.dataset import ShardDataset
from support.programs.daemon import Daemon
from support.programs.processes import MB, glibc_only, kept_bytes

pytestmark = [glibc_only, pytest.mark.slow]


def measure(_batch: list[Any]) -> int:
    """Collate a batch to the memory that its process keeps of what it has freed."""
    return kept_bytes(90 * MB, 100_000)


def kept_by_loader(dataset: ShardDataset, workers: int) -> int:
    """Return what the process that reads the first batch keeps of what it has freed."""
    context = "spawn" if workers else None
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=workers,
        collate_fn=measure,
        multiprocessing_context=context,
    )
    return next(iter(loader))  # type: ignore[no-any-return]


def test_only_workers_keep_what_a_batch_freed(daemon: Daemon, urls: str) -> None:
    """A worker's second batch touches no new memory, while other allocators are left alone."""
    dataset = ShardDataset(urls, socket=daemon.socket)
    assert kept_by_loader(dataset, workers=1) > 85 * MB
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(kept_by_loader, dataset, 0).result() < 70 * MB
