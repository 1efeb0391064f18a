"""`dataset.indexed()`: samples by number, from shards fetched on demand within a window."""

import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

from shardcache.errors import ConfigError, MissingMemberError
from shardcache_client.dataset import ShardDataset
from shardcache_client.reader import ShardReader
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples, write_indexed

COUNTS = (5, 0, 11, 3, 8)
KEYS = [f"{number:06d}" for number in range(sum(COUNTS))]


@pytest.fixture(scope="module")
def numbered(folder: Path) -> str:
    """The url of an index of shards with uneven counts; one is empty."""
    return write_indexed(folder / "numbered", COUNTS)


def test_every_number_is_its_sample(numbered: str, daemon: Daemon) -> None:
    """Samples come in any order, whatever the dataset's shuffle; other numbers are errors."""
    dataset = ShardDataset(
        numbered, shuffle=True, decode=lambda sample: sample["__key__"], socket=daemon.socket
    )
    with dataset.indexed(window=2) as samples:
        assert len(samples) == len(KEYS)
        order = random.Random(1).sample(range(len(KEYS)), len(KEYS))
        assert [samples[number] for number in order] == [KEYS[number] for number in order]
        assert samples[-1] == KEYS[-1]
        assert list(samples) == KEYS
        assert samples.__getitems__([9, 0, 9, 26]) == [KEYS[9], KEYS[0], KEYS[9], KEYS[26]]
        one, _, other = dataset.map(lambda key: [key]).indexed().__getitems__([9, 0, 9])
        # A collate function may change samples in place, and augmentation is drawn for each.
        assert one is not other
        for wrong in (len(KEYS), -len(KEYS) - 1):
            with pytest.raises(IndexError, match=f"sample {wrong} of a dataset with {len(KEYS)}"):
                samples[wrong]


@pytest.mark.parametrize("numbers", [np.array, torch.tensor])
def test_arrays_of_numbers_are_several(
    numbered: str, daemon: Daemon, numbers: Callable[[Any], Any]
) -> None:
    """Also one of a single number; one without a dimension is a number."""
    with ShardReader(
        numbered, decode=lambda sample: sample["__key__"], socket=daemon.socket
    ).indexed() as samples:
        assert samples[numbers([9, 0, -1])] == [KEYS[9], KEYS[0], KEYS[-1]]
        assert samples[numbers([9])] == [KEYS[9]]
        assert samples[numbers(9)] == KEYS[9]


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_samplers_and_workers(numbered: str, daemon: Daemon, context: str) -> None:
    """Each rank of a DistributedSampler gets its share, in workers with their own shards."""
    samples = ShardReader(numbered, socket=daemon.socket).indexed()
    assert samples[0]["__key__"] == KEYS[0]  # held by this process before it forks
    keys = []
    for rank in range(3):
        sampler: Any = DistributedSampler(samples, num_replicas=3, rank=rank, shuffle=False)  # type: ignore[arg-type]
        loader = DataLoader(
            samples,  # type: ignore[arg-type]
            batch_size=4,
            sampler=sampler,
            num_workers=2,
            collate_fn=list,
            multiprocessing_context=context,
        )
        keys += [sample["__key__"] for batch in loader for sample in batch]
    assert sorted(keys) == KEYS
    assert samples[6]["__key__"] == KEYS[6]
    subset = Subset(samples, [3, 1])  # type: ignore[arg-type]
    assert [sample["__key__"] for sample in subset] == [KEYS[3], KEYS[1]]
    samples.close()


@pytest.mark.slow
def test_threads_share_what_is_held(numbered: str, daemon: Daemon) -> None:
    """Each gets the samples that it asks for, although they close each other's shards."""
    wanted = random.Random(2).choices(range(len(KEYS)), k=100)
    with (
        ShardReader(numbered, socket=daemon.socket).indexed(window=1) as samples,
        ThreadPoolExecutor(4) as threads,
    ):
        assert [sample["__key__"] for sample in threads.map(samples.__getitem__, wanted)] == [
            KEYS[i] for i in wanted
        ]


def test_a_forked_process_holds_its_own_shards(numbered: str, daemon: Daemon) -> None:
    """A shard that the parent held stays cached for its child when the parent gives it up."""
    context = multiprocessing.get_context("fork")
    may_end = context.Event()

    def read() -> None:
        with samples:
            assert samples[0]["__key__"] == KEYS[0]
            may_end.wait(GUARD_S)

    eventually(lambda: daemon.leases() == 0)
    with ShardReader(numbered, socket=daemon.socket).indexed() as samples:
        assert samples[0]["__key__"] == KEYS[0]
        child = context.Process(target=read)
        child.start()
        eventually(lambda: daemon.leases() == 2)
        samples.close()
        eventually(lambda: daemon.leases() == 1)
        assert samples[1]["__key__"] == KEYS[1]
        may_end.set()
        child.join(GUARD_S)
        assert child.exitcode == 0
        eventually(lambda: daemon.leases() == 1)
    eventually(lambda: daemon.leases() == 0)


def test_the_shard_asked_for_last_stays(numbered: str, daemon: Daemon) -> None:
    """The window gives up the shard that was asked for longest ago, not opened first."""
    with ShardReader(numbered, socket=daemon.socket).indexed(window=2) as samples:
        for number in (0, 6, 1, 17):
            assert samples[number]["__key__"] == KEYS[number]
        assert "held=[0, 3]" in repr(samples)


def test_samples_that_cannot_be_numbered_are_refused(
    numbered: str, daemon: Daemon, folder: Path
) -> None:
    """Uncounted shards, filters and skipped samples leave numbers without a sample."""
    dataset = ShardDataset(numbered, socket=daemon.socket)
    with pytest.raises(ConfigError, match="some numbers would have no sample"):
        dataset.filter(bool).indexed()
    with pytest.raises(ConfigError, match="some numbers would have no sample"):
        ShardDataset(numbered, members=("jpg",), missing="skip", socket=daemon.socket).indexed()
    with (
        ShardDataset(numbered, members=("png",), socket=daemon.socket).indexed() as samples,
        pytest.raises(MissingMemberError),
    ):
        samples[0]
    (folder / "uncounted.tar").write_bytes(make_tar(random_samples(2, {"jpg": 5})))
    with pytest.raises(ConfigError, match="1 of 1 shards were never counted"):
        ShardDataset(f"file://{folder}/uncounted.tar", socket=daemon.socket).indexed()
