"""`ShardLoader` where something goes wrong, or comes at an unusual moment: nothing is lost without an error."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError, DecodeError
from shardcache_client import ShardDataset
from shardcache_client.loader import ShardLoader
from support.programs.guard import GUARD_S
from support.programs.processes import children
from support.shards.tars import KEYS, Make

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 with torch 2.13
]


def load(dataset: ShardDataset, workers: int, **options: Any) -> ShardLoader:
    """Return a loader of lists of keys."""
    return dataset.loader(num_workers=workers, collate_fn=keys_of, **options)


def keys_of(samples: list[dict[str, Any]]) -> list[str]:
    """Return the keys of a batch."""
    return [sample["__key__"] for sample in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_before_the_first_batch_does_not_empty_later_epochs(make: Make, tmp_path: Path, workers: int) -> None:
    """A loop that begins again reads samples again."""
    mended = tmp_path / "mended"

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if not mended.exists():
            raise ValueError("not yet")
        return sample

    loader = load(make(decode=decode), workers)
    with pytest.raises(DecodeError, match="not yet"):
        next(iter(loader))
    mended.touch()
    assert sorted(chain(*loader)) == KEYS
    assert sorted(chain(*loader)) == KEYS


def test_loader_resumes_where_a_worker_was_killed(make: Make) -> None:
    """The kill is an error; the state of before it has every other sample, read by new workers."""
    loader, before = load(make(), 2, prefetch_factor=1), {*children(os.getpid())}
    batches = iter(loader)
    taken = list(islice(batches, 3))
    workers = {*children(os.getpid())} - before
    assert len(workers) == 2
    os.kill(workers.pop(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        taken.extend(batches)
    loader.load_state_dict(loader.state_dict())
    assert sorted(chain(*taken, *loader)) == KEYS


@pytest.mark.parametrize("persistent", [True, False])
def test_a_loader_given_up_ends_its_workers_at_once(make: Make, persistent: bool) -> None:
    """Not when garbage happens to be collected, which may be in a process forked since."""
    before = {*children(os.getpid())}
    gc.disable()
    try:
        loader = load(make(), 2, persistent_workers=persistent)
        batches = iter(loader)
        next(batches)
        assert {*children(os.getpid())} > before
        del batches, loader
        assert {*children(os.getpid())} == before
    finally:
        gc.enable()


def test_a_state_is_not_taken_by_a_worker_of_an_iteration_given_up(make: Make, tmp_path: Path) -> None:
    """Not even if that worker is so slow that it begins after the state was loaded; that iteration can be read on."""
    whole = list(load(make(), 2))
    begun = load(make(), 2)
    list(islice(begun, 5))
    state, gate = begun.state_dict(), tmp_path / "gate"

    def wait(worker: int) -> None:
        limit_s = time.monotonic() + GUARD_S
        while worker == 1 and not gate.exists() and time.monotonic() < limit_s:
            time.sleep(0.01)

    loader = load(make(), 2, worker_init_fn=wait)
    given_up = iter(loader)
    assert next(given_up) == whole[0]
    gate.touch()
    loader.load_state_dict(state)
    assert list(loader) == whole[5:]
    assert list(given_up) == whole[1:]


def test_ranks_out_of_step_need_the_states_of_all(make: Make) -> None:
    """With `in_order=False`, one rank does not know which workers' batches another has taken."""
    loaders = [load(make(rank=rank, world_size=2), 2, in_order=False) for rank in range(2)]
    taken = [list(islice(loader, 3)) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    with pytest.raises(ConfigError, match="states of all ranks"):
        alone = load(make(), 0)
        alone.load_state_dict(states[0])
        list(alone)
    loader = load(make(), 0)
    loader.load_state_dict(states)
    read = Counter(chain(*chain(*taken), *loader))
    assert sorted(read) == KEYS
    assert read.total() <= len(KEYS) + 1  # padding


def test_global_batches_come_in_order(make: Make) -> None:
    """`in_order=False` would give other batches than the dataset promises, and a state that skips some."""
    with pytest.raises(ConfigError, match="in_order=False"):
        load(make(batch_size=1, global_batch_size=8), 2, in_order=False)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 1, "global_batch_size": 8}])
def test_other_ranks_resume_after_the_end_of_a_stateful_loaders_epoch(
    make: Make, workers: int, options: dict[str, Any]
) -> None:
    """With the next epoch: not with what is left of the last one, which is nothing."""
    dataset = make(rank=0, world_size=2, **options)
    loader = StatefulDataLoader(dataset, batch_size=dataset.batch_size, num_workers=workers, collate_fn=keys_of)
    list(loader)
    state = loader.state_dict()
    for ranks in (1, 2):
        resumed = [make(rank=rank, world_size=ranks, **options) for rank in range(ranks)]
        for each in resumed:
            each.load_state_dict(state)
            assert each.epoch == 1
        assert {sample["__key__"] for each in resumed for sample in each} == set(KEYS)
