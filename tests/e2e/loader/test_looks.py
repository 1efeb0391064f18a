"""Iterators of one loader or dataset are independent: a look changes neither loop nor state."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client.dataset import ShardDataset
from shardcache_client.loading.loader import ShardLoader
from support.cases import examples
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


def plain(ds: ShardDataset, workers: int = 0) -> DataLoader[Any]:
    """Return torch's own loader, of batches of one."""
    return DataLoader(ds, batch_size=1, collate_fn=keys_of, num_workers=workers)


@pytest.mark.slow
def test_iterators_of_a_plain_loader_with_workers_count_from_their_beginning(make: Make) -> None:
    """A left-out epoch costs nothing, while one that is read twice does."""
    whole = plain(make(batch_size=1))
    epochs = [list(whole) for _ in range(4)]
    loader = plain(make(batch_size=1), workers=2)
    next(iter(loader))
    read = []
    for step, batch in enumerate(loader):
        read.append(batch)
        if step == 20:
            next(iter(loader))
    assert read == epochs[1]
    assert list(loader) == epochs[3]


@pytest.mark.slow
def test_a_look_through_a_plain_loader_leaves_dataset_and_loop(make: Make) -> None:
    """Before the loop and during it: the epoch is whole, and the next one follows."""
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
    assert read == epochs[0]
    assert list(loader) == epochs[1]
    saving = load(make(batch_size=1))
    other = make(batch_size=1)
    taken = list(chain(*islice(saving, 13)))
    other.load_state_dict(saving.state_dict())
    next(iter(plain(other)))
    assert sorted(chain(taken, *plain(other))) == KEYS


@pytest.mark.slow
def test_a_look_at_the_dataset_leaves_its_iteration(make: Make) -> None:
    """Before it, in its middle, after a state was loaded, and where two are read at once."""
    plain = make()
    whole = keys_of(plain)
    following = keys_of(plain)
    ds = make()
    next(iter(ds))
    samples = iter(ds)
    assert keys_of(islice(samples, 10)) == whole[:10]
    state = saved(ds)
    assert keys_of(islice(ds, 20)) == following[:20]
    assert saved(ds) == state
    assert keys_of(samples) == whole[10:]
    assert ds.epoch == 1
    other = make()
    other.load_state_dict(state)
    next(iter(other))
    assert keys_of(other) == whole[10:]
    again = make()
    assert [
        [first["__key__"], second["__key__"]] for first, second in zip(again, again, strict=True)
    ] == [[key, key] for key in whole]


@dataclass(eq=False)
class NaiveIterator:
    """An iterator over lists of batches."""

    epoch: int | None = None  # None until its first batch is asked for
    place: int = 0
    taken: int = 0
    number: int = 0  # of the iterators that have begun
    is_held: bool = True  # until it has ended, or is dropped
    counts: bool = False
    is_look: bool = False  # True if it can no longer count
    is_outdated: bool = False  # True if a state was loaded since it began


class Naive:
    """Model of the loader, by lists of batches: epochs, iterators, and the position to be saved."""

    def __init__(self, epochs: list[list[Batch]]) -> None:
        self.epochs = epochs
        self.begun: list[NaiveIterator] = []  # last the one that was read last
        self.numbers = count()
        self.load(0, 0)

    def load(self, epoch: int, place: int) -> None:
        """Load a state."""
        self.next = epoch
        self.loaded = (epoch, place)
        self.main: NaiveIterator | None = None
        for each in self.begun:
            each.is_outdated = each.is_look = True
        self.begun = []

    def is_read(self, it: NaiveIterator) -> bool:
        """Return True if an iterator has no batch left."""
        return it.epoch is not None and it.place == len(self.epochs[it.epoch])

    def take(self, it: NaiveIterator) -> Batch | None:
        """Take an iterator's next batch; None at its end. Raises ConfigError if it is outdated."""
        if it.epoch is None:
            it.epoch = self.next
            it.place = self.loaded[1] if self.loaded[0] == it.epoch else 0
            it.number = next(self.numbers)
            self.begun.append(it)
        if self.is_read(it):
            self.count(it)
            it.is_held = False
            return None
        if it.is_outdated:
            it.is_held = False
            raise ConfigError("outdated")
        if it.taken == 1 or (it.counts and self.begun[-1] is not it):
            self.count(it)
        if it in self.begun:
            self.begun.remove(it)
        self.begun.append(it)
        it.taken += 1
        it.place += 1
        if self.is_read(it):
            self.count(it)
        return self.epochs[it.epoch][it.place - 1]

    def count(self, it: NaiveIterator) -> None:
        """Count an iterator; those begun since were nested in it."""
        main = self.main
        assert it.epoch is not None
        if (
            main is not None
            and main.epoch is not None
            and not it.counts
            and main.number > it.number
        ):
            it.is_look |= main.epoch > it.epoch or self.is_read(main)
        if it.is_look:
            return
        self.main = it
        self.next = it.epoch + 1
        self.loaded = (self.next, 0)
        it.counts = True
        for each in self.begun:
            each.is_look |= each.number > it.number

    @property
    def current(self) -> NaiveIterator | None:
        """The iterator whose position is the loader's."""
        held = [each for each in self.begun if each.is_held]
        return held[-1] if held else self.main

    def state(self) -> tuple[int, int]:
        """Return the epoch and place of the state."""
        epoch, place = self.shown()
        return (epoch + 1, 0) if place == len(self.epochs[epoch]) else (epoch, place)

    def shown(self) -> tuple[int, int]:
        """Return the loader's epoch and place; an epoch lasts as long as its iterator."""
        current = self.current
        if current is None or current.epoch is None:
            return self.loaded
        if self.is_read(current) and not current.is_held:
            return current.epoch + 1, 0
        return current.epoch, current.place


def follow(
    make: Make, steps: list[tuple[str, int]], epochs: list[list[Batch]], **options: Any
) -> None:
    """Do the steps with a loader and with the naive one, and compare all that both give."""
    loader = load(make(), **options)
    naive = Naive(epochs)
    iterators: list[tuple[Iterator[Batch], NaiveIterator]] = []
    states = [(saved(loader), (0, 0))]
    for step, number in steps:
        if step == "iter" or (step == "look" and naive.next < len(epochs) - 1):
            iterators.append((iter(loader), NaiveIterator()))
        if step in ("next", "look") and iterators and naive.next < len(epochs) - 1:
            real, model = iterators[-1 if step == "look" else number % len(iterators)]
            if model.is_held:
                assert taken(real) == expected(naive, model)
            del real
        if step in ("drop", "look") and iterators:
            _, model = iterators.pop(-1 if step == "look" else number % len(iterators))
            model.is_held = False
            del _
        if step == "save":
            states.append((saved(loader), naive.state()))
        if step == "load":
            state, place = states[number % len(states)]
            loader.load_state_dict(state)
            naive.load(*place)
        epoch, place = naive.shown()
        assert loader.epoch == epoch
        assert loader.remaining == len(epochs[epoch]) - place
    for state, (epoch, place) in states[-2:]:
        again = resumed(make, state, options.get("workers", 0))
        assert list(again) == epochs[epoch][place:]


def taken(batches: Iterator[Batch]) -> Batch | str | None:
    """Return an iterator's next batch, None at its end, the beginning of its error."""
    try:
        return next(batches, None)
    except ConfigError as exn:
        return str(exn)[:18]


def expected(naive: Naive, it: NaiveIterator) -> Batch | str | None:
    """Return what `taken` should return."""
    try:
        return naive.take(it)
    except ConfigError:
        return "a state was loaded"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["iter", "next", "next", "next", "next", "drop", "look", "save", "load"]),
        st.integers(0, 9),
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (15, {}),
        pytest.param(8, {"workers": 2, "persistent_workers": True}, marks=pytest.mark.slow),
        pytest.param(8, {"workers": 2, "persistent_workers": False}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_any_iterators_of_a_loader_read_what_naive_ones_do(
    make: Make, count: int, options: dict[str, Any]
) -> None:
    """Any order of reading, dropping, looking, saving and loading gives the same batches."""
    whole = load(make(), **options)
    epochs = [list(whole) for _ in range(6)]

    @examples(count)
    @given(steps=STEPS)
    def run(steps: Any) -> None:
        follow(make, steps, epochs, **options)

    run()
