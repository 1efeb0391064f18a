"""A state of any moment, loaded by anyone: exactly the rest of the epoch, from a real daemon."""

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.tars import BATCH, COUNTS, KEYS, Make, write_indexed, write_shards

# torchdata 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

Batch = list[dict[str, Any]]
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def train(folder: Path, daemon: Daemon) -> str:
    """The index file of shards with uneven counts, and a table of their samples beside it."""
    url = write_indexed(folder / "train", COUNTS)
    shards = [folder / "train" / f"{number}.tar" for number in range(len(COUNTS))]
    index = folder / "train" / "index.json"
    ran = shardcache("index", *shards, "-o", index, "--samples", socket=daemon.socket)
    assert ran.code == 0, ran.err
    return url


@pytest.fixture(params=["window", pytest.param("global", marks=pytest.mark.slow)])
def make(make: Make, request: pytest.FixtureRequest) -> Make:
    """A function that makes the dataset, in the order of a window or in one of all samples."""
    if request.param == "window":
        return make
    return partial(make, shuffle="global", shuffle_window=None)


def stateful(ds: ShardDataset, workers: int, **options: Any) -> Any:
    """Return a StatefulDataLoader of whole batches."""
    return StatefulDataLoader(ds, batch_size=BATCH, num_workers=workers, collate_fn=list, **options)


def own(ds: ShardDataset, workers: int, **options: Any) -> Any:
    """Return the dataset's own loader."""
    return ds.loader(num_workers=workers, collate_fn=list, **options)


def through_json(state: Any) -> Any:
    """Return a state as a checkpoint gives it back."""
    return json.loads(json.dumps(state))


def keys_of(batches: Iterator[Batch] | list[Batch]) -> list[str]:
    """Return the keys of all samples in order."""
    return [sample["__key__"] for sample in chain.from_iterable(batches)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("load", "workers", "options", "steps"),
    [
        (own, 0, {}, [0, 1, 11, 12]),
        pytest.param(own, 2, {"drop_last": True}, [0, 10, 11], marks=pytest.mark.slow),
        pytest.param(own, 3, {"persistent_workers": False}, [7], marks=pytest.mark.slow),
        pytest.param(own, 2, {"multiprocessing_context": "spawn"}, [3], marks=pytest.mark.slow),
        (stateful, 0, {}, [0, 5, 11, 12]),
        pytest.param(stateful, 2, {}, [0, 7], marks=pytest.mark.slow),
        pytest.param(stateful, 2, {"persistent_workers": True}, [5], marks=pytest.mark.slow),
        pytest.param(stateful, 2, {"snapshot_every_n_steps": 3}, [5], marks=pytest.mark.slow),
    ],
)
def test_resumed_loader_gives_exactly_the_next_batch(
    make: Make, load: Load, workers: int, options: dict[str, Any], steps: list[int]
) -> None:
    """The rest and the next epoch are, byte for byte, what would have come without a stop."""
    whole = load(make(), workers, **options)
    epochs = [list(whole), list(whole)]
    assert epochs[0] != epochs[1]
    for taken in steps:
        interrupted = load(make(), workers, **options)
        # Kept: one batch of an iterator that is dropped would be a look.
        batches = iter(interrupted)
        assert list(islice(batches, taken)) == epochs[0][:taken]
        resumed = load(make(), workers, **options)
        read = []
        resumed.load_state_dict(through_json(interrupted.state_dict()))
        expected = [*epochs[0], *epochs[1]][taken:]
        while len(read) < len(expected):
            read += list(resumed)
        assert read == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("even", [None, pytest.param("pad", marks=pytest.mark.slow)])
def test_other_ranks_and_workers_read_the_rest_once(make: Make, even: str | None) -> None:
    """Two ranks of two workers, then three of one, then one of three, read samples once."""
    read: list[str] = []
    states = []
    later = []
    for rank in range(2):
        first = stateful(make(rank=rank, world_size=2, even=even), 2)
        read += keys_of(list(islice(first, 2)))
        states.append(through_json(first.state_dict()))
    assert len(set(read)) == 16

    for ds in [make(rank=rank, world_size=3, even=even) for rank in range(3)]:
        ds.load_state_dict(states)
        samples = iter(ds)
        read += [sample["__key__"] for sample in islice(samples, 6)]
        later.append(through_json(ds.state_dict()))
    assert len(set(read)) == 34

    alone = make(even=even)
    alone.load_state_dict(later)
    loader = plain(alone, 3)
    read += keys_of(list(loader))
    assert sorted(set(read)) == KEYS
    assert len(read) <= len(KEYS) + (0 if even is None else 1 + 2), "none twice but as padding"
    assert sorted(keys_of(list(loader))) == KEYS, "the next epoch is whole again"
    assert len(json.dumps(later[0])) < 2_000


def plain(ds: ShardDataset, workers: int) -> DataLoader[Any]:
    """Return PyTorch's own loader of whole batches."""
    return DataLoader(ds, batch_size=BATCH, num_workers=workers, collate_fn=list)


def test_unknowable_state_is_refused(make: Make) -> None:
    """For instance the state of a plain loader's workers, which are ahead of the loop."""
    ds = make()
    samples = iter(ds)
    next(samples)
    next(iter(plain(ds, 1)))
    with pytest.raises(ConfigError, match="workers, which run ahead") as caught:
        ds.state_dict()
    assert "dataset.loader()" in caught.value.remedy


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loop_that_names_the_epoch_that_has_ended_reads_no_more_of_it(
    make: Make, workers: int
) -> None:
    """A periodic checkpoint saved it at the epoch's last step, and nothing comes twice."""
    ds = make()
    alone = make()
    for each in (ds, alone):
        each.set_epoch(3)
    loader = own(ds, workers)
    list(loader)
    list(alone)
    states = [loader.state_dict(), alone.state_dict()]
    ds.set_epoch(4)
    expected = list(plain(ds, workers))
    for state, topology in product(states, ({}, {"rank": 1, "world_size": 2})):
        resumed = make(**topology)
        resumed.load_state_dict(through_json(state))
        assert resumed.epoch == 4
        resumed.set_epoch(3)
        assert list(plain(resumed, workers)) == []
        resumed.set_epoch(4)
        assert list(plain(resumed, workers)) == expected or topology
        resumed.set_epoch(3)
        assert len(list(resumed)) == len(resumed), "whoever names it later wants it whole"


def test_an_end_that_comes_sooner_on_one_rank_where_a_short_batch_is_dropped(make: Make) -> None:
    """A rank of 23 samples in batches of 12 drops the short one, and ends before one of 24.

    From there on the first rank's state neither claims the next epoch for the other nor tells if
    that is in its second batch; the states of both continue exactly.
    """

    def rank(number: int) -> Any:
        return own(make(rank=number, world_size=2, even=None, batch_size=12), 0, drop_last=True)

    alone = make(rank=0, world_size=2, even=None, batch_size=12)
    loader = rank(0)
    other = rank(1)
    reading = iter(loader)
    others = iter(other)
    samples = iter(alone)
    next(reading)
    next(others)
    list(islice(samples, 12))
    state_of_other = other.state_dict()
    expected = list(others)
    for state in map(through_json, (loader.state_dict(), alone.state_dict())):
        resumed = rank(1)
        resumed.load_state_dict(state)
        with pytest.raises(ConfigError, match="states of all ranks"):
            list(resumed)
        resumed.load_state_dict([state, state_of_other])
        assert list(resumed) == expected


@pytest.mark.slow
def test_end_of_a_rank_is_in_the_states_of_a_plain_loaders_workers(make: Make) -> None:
    """A rank of 24 samples in batches of 23 has a further batch, unlike one of 23."""

    def rank(number: int) -> Any:
        ds = make(rank=number, world_size=2, even=None, batch_size=23)
        return StatefulDataLoader(ds, batch_size=23, num_workers=2, collate_fn=list)

    loader = rank(0)
    other = rank(1)
    next(iter(loader))
    others = iter(other)
    next(others)
    state = through_json(loader.state_dict())
    state_of_other = through_json(other.state_dict())
    expected = list(others)

    resumed = rank(1).dataset
    resumed.load_state_dict(state)
    with pytest.raises(ConfigError, match="states of all ranks"):
        list(resumed)
    resumed.load_state_dict([state, state_of_other])
    assert [list(resumed)] == expected


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", first_quick([2, 1, 3]))
def test_end_states_of_all_ranks_resume_with_the_next_epoch(
    make: Make, workers: int, drop_last: bool, world_size: int
) -> None:
    """One of the ranks may end sooner, with 23 and 24 samples, or drop a short batch."""
    loaders = [
        own(make(rank=rank, world_size=2, even=None), workers, drop_last=drop_last)
        for rank in range(2)
    ]
    for loader in loaders:
        list(loader)
    states = through_json([loader.state_dict() for loader in loaders])

    resumed = [
        own(make(rank=rank, world_size=world_size, even=None), workers, drop_last=drop_last)
        for rank in range(world_size)
    ]
    for loader in resumed:
        loader.load_state_dict(states)
        assert loader.epoch == 1
        assert len(list(loader)) == len(loader)


def test_end_states_of_ranks_of_which_some_had_nothing_left(make: Make) -> None:
    """Of four ranks that share the last three samples of another's epoch, one gets none."""

    def rank(number: int, ranks: int) -> Any:
        return own(make(rank=number, world_size=ranks, even=None, batch_size=BATCH), 0)

    first = rank(0, 1)
    list(islice(iter(first), len(KEYS) // BATCH))
    states = []
    for number in range(4):
        resumed = rank(number, 4)
        resumed.load_state_dict(first.state_dict())
        list(resumed)
        states.append(through_json(resumed.state_dict()))
    after = rank(0, 4)
    after.load_state_dict(states)
    assert after.epoch == 1


@pytest.mark.slow
def test_end_states_of_all_ranks_resume_without_counts(tmp_path: Path, folder: Path) -> None:
    """Each rank knows of its own end alone, and all states together say that the epoch is over."""
    write_shards(tmp_path, 4, 5)
    pattern = f"file://{tmp_path}/shard-{{000000..000003}}.tar"

    def rank(number: int, socket: str) -> Any:
        return own(
            ShardDataset(
                pattern, rank=number, world_size=2, even=None, batch_size=2, socket=socket
            ),
            0,
        )

    with tempfile.TemporaryDirectory(dir=folder) as first, Daemon(Path(first)) as fresh:
        loaders = [rank(number, fresh.socket) for number in range(2)]
        for loader in loaders:
            list(loader)
        states = through_json([loader.state_dict() for loader in loaders])
    with tempfile.TemporaryDirectory(dir=folder) as second, Daemon(Path(second)) as fresh:
        for number in range(2):
            resumed = rank(number, fresh.socket)
            resumed.load_state_dict(states)
            assert resumed.epoch == 1
            assert len(keys_of(list(resumed))) == 10
