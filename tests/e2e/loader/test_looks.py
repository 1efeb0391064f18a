"""Iterators of one loader or dataset are independent: a look changes neither the running loop nor what is saved."""

import json
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache_client import ShardDataset
from shardcache_client.loader import ShardLoader
from support.programs.daemon import Daemon
from support.shards.tars import write_indexed

# The machine may have fewer CPUs than a test has workers; torchdata 0.11 with torch 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

COUNTS = (5, 11, 3, 8)
KEYS = [f"{number:06d}" for number in range(sum(COUNTS))]
BATCH = 4

Make = Callable[..., ShardDataset]
Batch = list[str]


@pytest.fixture(scope="module")
def train(folder: Path) -> str:
    """The index file of shards with uneven counts."""
    return write_indexed(folder / "train", COUNTS)


@pytest.fixture(scope="module")
def make(daemon: Daemon, train: str) -> Make:
    """A function that makes the dataset as each process of a job would."""

    def make_dataset(**options: Any) -> ShardDataset:
        chosen = {"shuffle": True, "shuffle_window": 3, "seed": 7, "socket": daemon.socket}
        return ShardDataset(train, **chosen | options)

    return make_dataset


def keys_of(samples: Any) -> list[str]:
    """Return the keys of samples."""
    return [sample["__key__"] for sample in samples]


def load(dataset: ShardDataset, workers: int = 0, **options: Any) -> ShardLoader[Batch]:
    """Return a loader of lists of keys."""
    return dataset.loader(batch_size=BATCH, num_workers=workers, collate_fn=keys_of, **options)


def saved(loader: Any) -> Any:
    """Return the state as a checkpoint gives it back."""
    return json.loads(json.dumps(loader.state_dict()))


def resumed(make: Make, state: Any, workers: int = 0) -> ShardLoader[Batch]:
    """Return a loader that resumes in a new process."""
    loader = load(make(), workers)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_in_the_middle_of_an_epoch_leaves_loop_and_state(make: Make, workers: int) -> None:
    """At the first batch and at a later one: the epoch is whole, a state is that of the loop, and so is the next."""
    whole = load(make(), workers)
    epochs = [list(whole), list(whole)]
    loader = load(make(), workers)
    read = []
    for step, batch in enumerate(loader):
        read.append(batch)
        if step in (0, 3):
            assert next(iter(loader)) == epochs[0][0]
            left = resumed(make, saved(loader), workers)
            assert (left.epoch, left.remaining) == (0, len(loader) - step - 1)
    assert read == epochs[0]
    assert list(left) == epochs[0][4:]
    assert (loader.epoch, list(loader)) == (1, epochs[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_before_the_loop_takes_nothing_from_it(make: Make, workers: int) -> None:
    """Whether its iterator is dropped or kept, as in PyTorch's tutorials; also after a state was loaded."""
    whole = list(load(make(), workers))
    loader = load(make(), workers)
    assert next(iter(loader)) == whole[0]
    assert (loader.epoch, loader.remaining, loader.state_dict()) == (0, 7, load(make(), workers).state_dict())
    kept = iter(loader)
    assert next(kept) == whole[0]
    batches = iter(loader)
    assert list(islice(batches, 3)) == whole[:3]
    state = saved(loader)
    assert next(kept) == whole[1]
    assert saved(loader) == state
    assert list(batches) == whole[3:]
    again = resumed(make, state, workers)
    assert next(iter(again)) == whole[3]
    assert list(again) == whole[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_iterators_at_once_each_read_the_epoch(make: Make, workers: int) -> None:
    """As those of a DataLoader, one inside of the other, too; the next epoch follows."""
    loader = load(make(), workers)
    first, second = zip(*zip(loader, loader, strict=True), strict=True)
    assert sorted(chain(*first)) == sorted(chain(*second)) == KEYS
    assert loader.epoch == 1


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}])
def test_a_look_through_a_plain_loader_leaves_dataset_and_loop(make: Make, options: dict[str, Any]) -> None:
    """Before the loop and during it: the epoch is whole, and the next one follows."""

    def plain(ds: ShardDataset) -> DataLoader[Any]:
        return DataLoader(ds, batch_size=1, collate_fn=keys_of, **options)

    whole = plain(make())
    epochs = [list(whole), list(whole)]
    ds = make()
    loader = plain(ds)
    next(iter(loader))
    read = []
    for step, batch in enumerate(loader):
        read.append(batch)
        if step == 20:
            next(iter(loader))
    assert (read, list(loader)) == (epochs[0], epochs[1])
    saving, other = load(make()), make()
    taken = list(chain(*islice(saving, 3)))
    other.load_state_dict(saving.state_dict())
    next(iter(plain(other)))
    assert sorted(chain(taken, *plain(other))) == KEYS


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


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_through_a_stateful_loader_takes_nothing_from_the_dataset(make: Make, workers: int) -> None:
    """Which epoch follows, and that a loop reads it whole, does not depend on it."""
    loader: Any = StatefulDataLoader(make(), batch_size=1, num_workers=workers, collate_fn=keys_of)
    next(iter(loader))
    assert [sorted(chain(*loader)), sorted(chain(*loader))] == [KEYS, KEYS]
    ds = make()
    next(iter(StatefulDataLoader(ds, batch_size=1, num_workers=workers, collate_fn=keys_of)))
    assert ds.epoch == 0


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


@pytest.fixture(scope="module")
def epochs_of(make: Make) -> Callable[[int], list[list[Batch]]]:
    """The batches of some epochs, by the number of workers."""

    def read(workers: int) -> list[list[Batch]]:
        loader = load(make(), workers)
        return [list(loader) for _ in range(6)]

    return read


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_iterators_of_a_loader_read_what_naive_ones_do(make: Make, known: list[list[Batch]], steps: Any) -> None:
    """In any order of beginning, reading, dropping, looking, saving and loading."""
    follow(make, steps, known)


@pytest.fixture(scope="module")
def known(epochs_of: Callable[[int], list[list[Batch]]]) -> list[list[Batch]]:
    """The batches of some epochs without workers."""
    return epochs_of(0)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [True, False])
def test_any_iterators_of_a_loader_with_workers_do_so_too(
    make: Make, epochs_of: Callable[[int], list[list[Batch]]], persistent: bool
) -> None:
    """Whoever gets workers of its own."""
    epochs = epochs_of(2)

    @settings(max_examples=8, deadline=None)
    @given(steps=STEPS)
    def run(steps: Any) -> None:
        follow(make, steps, epochs, workers=2, persistent_workers=persistent)

    run()
