"""Iterators of one loader or dataset are independent: a look changes neither the running loop nor what is saved."""

import json
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardcache_client import ShardDataset
from shardcache_client.loader import ShardLoader
from support.shards.reading import keys_of
from support.shards.tars import KEYS, Make

# The machine may have fewer CPUs than a test has workers; torchdata 0.11 with torch 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


Batch = list[str]


def load(dataset: ShardDataset, workers: int = 0, **options: Any) -> ShardLoader[Batch]:
    """Return a loader of lists of keys."""
    return dataset.loader(num_workers=workers, collate_fn=keys_of, **options)


def saved(loader: Any) -> Any:
    """Return the state as a checkpoint gives it back."""
    return json.loads(json.dumps(loader.state_dict()))


def resumed(make: Make, state: Any, workers: int = 0) -> ShardLoader[Batch]:
    """Return a loader that resumes in a new process."""
    loader = load(make(), workers)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}])
@pytest.mark.slow
def test_a_look_through_a_plain_loader_leaves_dataset_and_loop(make: Make, options: dict[str, Any]) -> None:
    """Before the loop and during it: the epoch is whole, and the next one follows."""

    def plain(ds: ShardDataset) -> DataLoader[Any]:
        return DataLoader(ds, batch_size=1, collate_fn=keys_of, **options)

    whole = plain(make(batch_size=1))
    epochs = [list(whole), list(whole)]
    ds = make(batch_size=1)
    loader = plain(ds)
    next(iter(loader))
    read = []
    for step, batch in enumerate(loader):
        read.append(batch)
        if step == 20:
            next(iter(loader))
    assert (read, list(loader)) == (epochs[0], epochs[1])
    saving, other = load(make(batch_size=1)), make(batch_size=1)
    taken = list(chain(*islice(saving, 13)))
    other.load_state_dict(saving.state_dict())
    next(iter(plain(other)))
    assert sorted(chain(taken, *plain(other))) == KEYS


@pytest.mark.slow
def test_a_look_at_the_dataset_leaves_its_iteration(make: Make) -> None:
    """Before it, in its middle, after a state was loaded, and where two are read at once."""
    whole = keys_of(make())
    ds = make()
    next(iter(ds))
    samples = iter(ds)
    assert keys_of(islice(samples, 10)) == whole[:10]
    state = saved(ds)
    assert keys_of(islice(ds, 20)) == whole[:20]
    assert saved(ds) == state
    assert keys_of(samples) == whole[10:]
    assert ds.epoch == 1
    other = make()
    other.load_state_dict(state)
    next(iter(other))
    assert keys_of(other) == whole[10:]
    again = make()
    assert [[first["__key__"], second["__key__"]] for first, second in zip(again, again, strict=True)] == [
        [key, key] for key in whole
    ]


class Naive:
    """What the loader should do, by lists of batches: epochs, iterators, and the position to be saved."""

    def __init__(self, epochs: list[list[Batch]]) -> None:
        self.epochs = epochs
        self.iterators: list[dict[str, Any]] = []
        self.main: dict[str, Any] | None = None
        self.go_on(0, 0)

    def go_on(self, epoch: int, place: int) -> None:
        """Load a state."""
        self.next, self.loaded, self.main = epoch, (epoch, place), None
        for each in self.iterators:
            each["look"] = True

    def take(self, it: dict[str, Any]) -> Batch | None:
        """Take an iterator's next batch; None at its end."""
        if "epoch" not in it:
            live = self.main is not None and self.is_read(self.main)
            it["look"] = live
            it["epoch"] = self.main["epoch"] if live and self.main else self.next
            it["place"] = self.loaded[1] if not live and self.loaded[0] == it["epoch"] else 0
            self.iterators.append(it)
        batches = self.epochs[it["epoch"]]
        over = it["place"] == len(batches)
        if (it["taken"] == 1 or over) and not it["look"]:
            if self.main is not it:
                self.go_on(it["epoch"] + 1, 0)
            self.main, it["look"] = it, False
        it["live"] = not over
        it["taken"] += 1
        it["place"] += not over
        return None if over else batches[it["place"] - 1]

    def is_read(self, it: dict[str, Any]) -> bool:
        """Return True if an iterator has batches left, and its reader has not dropped it."""
        return bool(it["live"] and it["place"] < len(self.epochs[it["epoch"]]))

    def position(self) -> tuple[int, int]:
        """Return epoch and place of the state."""
        current = self.main
        if current is None or not self.is_read(current):
            begun = [each for each in self.iterators if each["live"] and not each["look"]]
            current = begun[-1] if begun else current
        epoch, place = (current["epoch"], current["place"]) if current else self.loaded
        return (epoch + 1, 0) if place == len(self.epochs[epoch]) else (epoch, place)


def follow(make: Make, steps: list[tuple[str, int]], epochs: list[list[Batch]], **options: Any) -> None:
    """Do the steps with a loader and with the naive one, and compare all that both give."""
    loader, naive = load(make(), **options), Naive(epochs)
    iterators: list[tuple[Iterator[Batch], dict[str, Any]]] = []
    states = [(saved(loader), (0, 0))]
    for step, number in steps:
        if step == "iter" or (step == "look" and naive.next < len(epochs) - 1):
            iterators.append((iter(loader), {"taken": 0, "live": True, "look": False}))
        if step in ("next", "look") and iterators and naive.next < len(epochs) - 1:
            real, model = iterators[-1 if step == "look" else number % len(iterators)]
            if model["live"]:
                assert next(real, None) == naive.take(model)
            del real
        if step in ("drop", "look") and iterators:
            _, model = iterators.pop(-1 if step == "look" else number % len(iterators))
            model["live"] = False
            del _
        if step == "save":
            states.append((saved(loader), naive.position()))
        if step == "load":
            state, place = states[number % len(states)]
            loader.load_state_dict(state)
            naive.go_on(*place)
        epoch, place = naive.position()
        assert (loader.epoch, loader.remaining) == (epoch, len(epochs[epoch]) - place)
    for state, (epoch, place) in states[-2:]:
        again = resumed(make, state, options.get("workers", 0))
        assert list(again) == epochs[epoch][place:]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["iter", "next", "next", "next", "next", "drop", "look", "save", "load"]), st.integers(0, 9)
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    ("examples", "options"),
    [
        (15, {}),
        pytest.param(8, {"workers": 2, "persistent_workers": True}, marks=pytest.mark.slow),
        pytest.param(8, {"workers": 2, "persistent_workers": False}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_any_iterators_of_a_loader_read_what_naive_ones_do(make: Make, examples: int, options: dict[str, Any]) -> None:
    """In any order of beginning, reading, dropping, looking, saving and loading, whoever gets workers of its own."""
    whole = load(make(), **options)
    epochs = [list(whole) for _ in range(6)]

    @settings(max_examples=examples)
    @given(steps=STEPS)
    def run(steps: Any) -> None:
        follow(make, steps, epochs, **options)

    run()
