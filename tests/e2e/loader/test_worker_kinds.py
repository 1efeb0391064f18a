"""A batch is a number: whoever makes it and goes on, the batches are the same."""

import json
import threading
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError, DecodeError
from shardcache_client.dataset import ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.cases import examples
from support.shards.reading import keys_of
from support.shards.tars import BATCH, KEYS, Make

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

KINDS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 3, "workers": "threads"},
    {"num_workers": 2, "workers": "auto"},
    {"num_workers": 1},
    {"num_workers": 3, "persistent_workers": False},
]
QUICK_PAIRS = {(0, 4), (2, 1)}
PAIRS = [
    pytest.param(before, after, marks=[] if (i, k) in QUICK_PAIRS else pytest.mark.slow)
    for i, before in enumerate(KINDS)
    for k, after in enumerate(KINDS)
]
"""Kinds before and after: quick ones to processes and threads, the others as slow tests."""


def kinds(*quick: int) -> list[Any]:
    """Return all kinds, of which these are quick."""
    return [
        pytest.param(kind, marks=[] if i in quick else pytest.mark.slow)
        for i, kind in enumerate(KINDS)
    ]


Batches = list[list[str]]


def load(dataset: ShardDataset, **options: Any) -> ShardLoader[list[str]]:
    """Return a loader of lists of keys."""
    return dataset.loader(collate_fn=keys_of, **options)


def saved(loader: ShardLoader[list[str]]) -> Any:
    """Return the state as a checkpoint gives it back."""
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"shuffle": False}, marks=pytest.mark.slow),
        pytest.param({"samples_per_epoch": 100}, marks=pytest.mark.slow),
        pytest.param({"rank": 1, "world_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_batches_are_the_same_for_any_workers(make: Make, options: dict[str, Any]) -> None:
    """Of all kinds and numbers, and those of a plain DataLoader over the dataset."""
    kinds = [load(make(**options), **kind) for kind in KINDS]
    first, *others = [[list(loader), list(loader)] for loader in kinds]
    assert others == [first] * len(others)
    for workers in (0, 2):
        plain = DataLoader(make(**options), BATCH, num_workers=workers, collate_fn=keys_of)
        assert [list(plain), list(plain)] == first


@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.slow), None])
def test_plain_loader_of_batches_of_another_size_has_the_order_of_one_process(
    make: Make, size: int | None
) -> None:
    """Though the dataset has not been told of it."""
    expected = keys_of(make())
    loader: Any = DataLoader(make(), size, num_workers=3, collate_fn=lambda each: each)
    batches = list(loader)
    assert keys_of(batches if size is None else chain(*batches)) == expected


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_any_workers_resume_from_the_state_of_any(
    make: Make, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The state says how many batches were taken, and nothing of workers."""
    whole = list(load(make(), num_workers=0))
    loader = load(make(), **before)
    taken = list(islice(loader, 5))
    state = saved(loader)
    assert state["epoch"] == 0
    assert state["phases"] == [[1, BATCH, 5]]
    assert len(json.dumps(state)) < 300
    resumed = load(make(), **after)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == whole


@pytest.mark.parametrize("kind", kinds(1, 3))
def test_seed_of_a_loaded_state_reaches_workers_that_run(make: Make, kind: dict[str, Any]) -> None:
    """Those that persist have begun in the order of another one."""
    drawn = load(make(seed=None), num_workers=0)
    taken = list(islice(drawn, 4))
    state = saved(drawn)
    loader = load(make(seed=None), **kind)
    list(loader)
    loader.load_state_dict(state)
    found = list(loader)
    assert sorted(chain(*taken, *found)) == KEYS
    again = load(make(seed=None), num_workers=0)
    again.load_state_dict(state)
    assert found == list(again)


def test_another_batch_size_goes_on_in_the_same_order(make: Make) -> None:
    """With the very next sample."""
    loader = load(make(), num_workers=0)
    taken = list(islice(loader, 3))
    resumed = load(make(), num_workers=0, batch_size=7)
    resumed.load_state_dict(saved(loader))
    assert [*chain(*taken), *chain(*resumed)] == keys_of(make())


@pytest.fixture(params=kinds(0, 1, 3), ids=str)
def loader(make: Make, request: pytest.FixtureRequest) -> Iterator[ShardLoader[list[str]]]:
    """A loader with workers of any kind."""
    yield load(make(), **request.param)


@pytest.mark.slow
@examples(8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=4))
def test_batches_that_are_left_out_count_as_taken(
    make: Make, loader: ShardLoader[list[str]], steps: list[tuple[int, int]]
) -> None:
    """In the loop and in the state; what follows is what would have followed."""
    loader.set_epoch(0)
    whole = list(load(make(), num_workers=0))
    batches = iter(loader)
    at = 0
    for take, leave in steps:
        assert list(islice(batches, take)) == whole[at : at + take]
        at = min(at + take, len(whole))
        if at == len(whole):
            break
        loader.skip(leave)
        at = min(at + leave, len(whole))
        assert loader.remaining == len(whole) - at
        assert saved(loader)["phases"] == [[1, BATCH, at]]
    assert list(batches) == whole[at:]


def test_batches_are_left_out_before_a_loop(make: Make) -> None:
    """The first ones; the next epoch is whole."""
    whole = list(load(make(), num_workers=0))
    loader = load(make(), num_workers=0)
    loader.skip(4)
    assert loader.epoch == 0
    assert loader.remaining == len(whole) - 4
    assert list(loader) == whole[4:]
    assert sorted(chain(*loader)) == KEYS


@pytest.mark.slow
@pytest.mark.parametrize("taken", [2, 5])
def test_batches_are_left_out_of_the_epoch_after_a_loop_that_was_left(
    make: Make, taken: int
) -> None:
    """They are counted from where the next iterator begins, and so they are in the state."""
    reference = load(make(), num_workers=0)
    epochs = [list(reference) for _ in range(3)]
    loader = load(make(), num_workers=0)
    assert list(islice(loader, taken)) == epochs[0][:taken]
    loader.skip(2)
    state = saved(loader)
    assert state["epoch"] == 1
    assert state["phases"] == [[1, BATCH, 2]]
    assert loader.epoch == 1
    assert loader.remaining == len(epochs[1]) - 2
    assert list(loader) == epochs[1][2:]
    assert list(loader) == epochs[2]


def test_batches_are_left_out_after_a_look_from_where_it_began(make: Make) -> None:
    """As the next iterator begins there."""
    whole = list(load(make(), num_workers=0))
    loader = load(make(), num_workers=0)
    assert next(iter(loader)) == whole[0]
    loader.skip(3)
    assert list(loader) == whole[3:]


def test_epoch_that_was_set_stays_set_when_batches_are_left_out(make: Make) -> None:
    """They are of its beginning, also after a loop over it that was left, and once."""
    reference = load(make(), num_workers=0)
    epochs = [list(reference) for _ in range(5)]
    loader = load(make(), num_workers=0)
    loader.set_epoch(3)
    list(islice(loader, 4))
    loader.skip(2)
    assert loader.epoch == 3
    assert loader.remaining == len(epochs[3]) - 2
    assert list(loader) == epochs[3][2:]
    assert list(loader) == epochs[3]
    loader.skip(1)
    loader.set_epoch(4)
    assert list(loader) == epochs[4]


def test_leaving_no_batches_out_changes_nothing(make: Make) -> None:
    """Neither the state of a loop that was left, nor the epoch after it."""
    loader = load(make(), num_workers=0)
    list(islice(loader, 4))
    state = saved(loader)
    loader.skip(0)
    assert saved(loader) == state


def test_batches_of_a_filtered_dataset_cannot_be_left_out(make: Make) -> None:
    """They have no numbers."""
    with pytest.raises(ConfigError, match="batches that have numbers"):
        load(make().filter(bool), num_workers=0).skip(1)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("kind", kinds(0, 1, 2))
def test_batches_are_in_pinned_memory_if_there_is_a_device_for_it(
    make: Make, kind: dict[str, Any]
) -> None:
    """All kinds of workers do so. Without a device, `pin_memory=True` changes nothing."""
    whole = list(load(make(), num_workers=0))
    dataset = make().map(lambda sample: int(sample["__key__"]))
    batches: list[torch.Tensor] = list(dataset.loader(pin_memory=True, **kind))
    assert [[f"{number:06d}" for number in batch.tolist()] for batch in batches] == whole
    assert {batch.is_pinned() for batch in batches} == {torch.accelerator.is_available()}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
@pytest.mark.parametrize("kind", kinds(1))
def test_batches_without_numbers_are_in_pinned_memory_if_there_is_a_device_for_it(
    make: Make, kind: dict[str, Any]
) -> None:
    """Those of a filter, which the training process makes of what workers have decoded."""
    dataset = (
        make()
        .filter(lambda sample: int(sample["__key__"]) % 2)
        .map(lambda sample: int(sample["__key__"]))
    )
    expected = [batch.tolist() for batch in dataset.loader(num_workers=0)]
    batches: list[torch.Tensor] = list(dataset.loader(pin_memory=True, **kind))
    assert [batch.tolist() for batch in batches] == expected
    assert {batch.is_pinned() for batch in batches} == {torch.accelerator.is_available()}


# Threads


def running() -> set[str]:
    """Return the names of the threads that read and make batches."""
    return {
        thread.name for thread in threading.enumerate() if thread.name.startswith("shardcache-")
    }


@pytest.mark.parametrize("end", [list, next, lambda batches: batches.close()])
def test_an_iterator_leaves_no_thread(make: Make, end: Callable[[Iterator[Any]], object]) -> None:
    """Once the iterator has ended, was dropped or closed."""
    before = running()
    batches = iter(load(make(), num_workers=2, workers="threads"))
    end(batches)
    del batches
    assert running() <= before


def test_error_of_a_thread_comes_where_its_batch_would_have_come(make: Make) -> None:
    """With its type, after the batches before it; the loader reads on from the next one."""
    whole = list(load(make(), num_workers=0))
    bad = whole[5][1]

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == bad:
            raise ValueError("no image")
        return sample

    loader = load(make(decode=decode), num_workers=2, workers="threads")
    taken = []
    with pytest.raises(DecodeError, match="no image"):
        taken.extend(loader)
    loader.load_state_dict(saved(loader))
    loader.skip(1)
    assert taken + list(loader) == whole[:5] + whole[6:]


@pytest.mark.parametrize("option", ["worker_init_fn", "multiprocessing_context", "timeout"])
def test_options_of_processes_are_refused_for_threads(make: Make, option: str) -> None:
    """They would have no effect."""
    values = {"worker_init_fn": print, "multiprocessing_context": "spawn", "timeout": 5}
    with pytest.raises(ConfigError, match=f"{option} applies to worker processes"):
        load(make(), num_workers=2, workers="threads", **{option: values[option]})
