"""Samples whose batches have no numbers: filtered, uncounted, or batched by length."""

import json
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.handlers import ignore_and_continue
from shardcache_client.lengths import LengthBatches, batch_by_length
from support.shards.reading import keys_of
from support.shards.tars import KEYS, Make

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

KINDS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 3, "workers": "threads"},
    {"num_workers": 2, "workers": "auto"},
    {"num_workers": 1},
    {"num_workers": 3, "persistent_workers": False},
]
Kind = dict[str, Any]
PAIRS = [
    pytest.param(before, after, marks=[] if (i - k) % len(KINDS) == 1 else pytest.mark.slow)
    for i, before in enumerate(KINDS)
    for k, after in enumerate(KINDS)
]
"""Kinds before and after: each with its neighbour, and the others as slow tests."""
OTHERS = [
    *KINDS[1:2],
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[2:-1]),
    *KINDS[-1:],
]
"""Kinds beside the training process itself: threads and processes."""
Data = Callable[[], Any]
"""Makes a dataset anew, as each process of a job would."""


def is_kept(sample: dict[str, Any]) -> bool:
    """Return True for two samples of three."""
    return int(sample["__key__"]) % 3 > 0


def length(sample: dict[str, Any]) -> int:
    """Return a number between 1 and 17 that the key determines."""
    return 1 + int(sample["__key__"]) * 7 % 17


KEPT = [key for key in KEYS if int(key) % 3]


# Batches by length alone have tests of their own.
@pytest.fixture(
    params=[
        pytest.param("filtered", marks=pytest.mark.slow),
        pytest.param("uncounted", marks=pytest.mark.slow),
        pytest.param("by length", marks=pytest.mark.slow),
        "a filtered mixture by length",
    ]
)
def data(request: pytest.FixtureRequest, make: Make, folder: Path) -> Data:
    """Makes the dataset of this kind."""
    kinds: dict[str, Data] = {
        "filtered": lambda: make().filter(is_kept),
        # As one of two ranks that may have other counts.
        "uncounted": lambda: make(f"file://{folder}/train/*.tar", rank=1, world_size=2, even=None),
        "by length": lambda: by_length(make()),
        "a filtered mixture by length": lambda: by_length(mixed(make)),
    }
    return kinds[request.param]


def by_length(dataset: ShardDataset[Any]) -> LengthBatches[Any]:
    """Return batches of at most 40 in all."""
    return batch_by_length(dataset, 40, length, sort_buffer=13, collate=keys_of)


def mixed(make: Make) -> Mixture[Any]:
    """Return a mixture of two parts of the samples, of which a third is left out."""
    sources = {
        "even": make().subset(range(0, len(KEYS), 2)),
        "odd": make().subset(range(1, len(KEYS), 2)),
    }
    return Mixture(sources, {"even": 0.7, "odd": 0.3}).filter(is_kept)


def load(dataset: Any, **kind: Any) -> Any:
    """Return a loader of lists of keys."""
    options = {} if isinstance(dataset, LengthBatches) else {"collate_fn": keys_of}
    return dataset.loader(**options, **kind)


def saved(loader: Any) -> Any:
    """Return the state as a checkpoint gives it back."""
    return json.loads(json.dumps(loader.state_dict()))


@pytest.mark.parametrize("kind", OTHERS)
def test_batches_are_the_same_for_any_workers(data: Data, kind: Kind) -> None:
    """Two epochs, each of which is another order."""
    alone = load(data(), num_workers=0)
    others = load(data(), **kind)
    first = [list(alone), list(alone)]
    assert [list(others), list(others)] == first
    assert first[0] != first[1]


def test_loader_of_batches_by_length_takes_only_none_for_options_of_batches(make: Make) -> None:
    """None is what a DataLoader over such batches takes; any other value would change them."""
    batches = list(by_length(make()).loader(num_workers=0))
    found = list(by_length(make()).loader(num_workers=0, batch_size=None, collate_fn=None))
    assert found == batches
    with pytest.raises(ConfigError, match="does not take batch_size"):
        by_length(make()).loader(num_workers=0, batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_any_workers_resume_from_the_state_of_any(data: Data, before: Kind, after: Kind) -> None:
    """With the very next batch, after each number of batches; the state says nothing of workers."""
    whole = list(load(data(), num_workers=0))
    loader = load(data(), **before)
    taken = list(islice(loader, 4))
    state = saved(loader)
    assert len(json.dumps(state)) < 400
    resumed = load(data(), **after)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == whole


@pytest.mark.slow
def test_each_batch_is_followed_by_the_next(data: Data) -> None:
    """Whichever was the last that the state knows of."""
    whole = list(load(data(), num_workers=0))
    for batches in range(len(whole) + 1):
        loader = load(data(), num_workers=0)
        iterator = iter(loader)
        assert list(islice(iterator, batches)) == whole[:batches]
        resumed = load(data(), num_workers=2, workers="threads")
        resumed.load_state_dict(saved(loader))
        rest = list(resumed) if batches < len(whole) or resumed.epoch == 0 else []
        assert whole[:batches] + rest == whole


def test_plain_loader_resumes_with_the_very_next_batch(data: Data) -> None:
    """Its workers are readers of their own, so the order depends on their number."""

    def stateful() -> Any:
        loaded = data()
        if isinstance(loaded, LengthBatches):
            return StatefulDataLoader(loaded, None, num_workers=2)
        return StatefulDataLoader(loaded, 4, num_workers=2, collate_fn=keys_of)

    whole = list(stateful())
    loader = stateful()
    taken = list(islice(loader, 5))
    resumed = stateful()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert taken + list(resumed) == whole


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_each_sample_of_a_filter_comes_once(make: Make, workers: int) -> None:
    """A plain DataLoader may have any number of workers, and other ranks may resume."""
    loader = DataLoader(make().filter(is_kept), 4, num_workers=workers, collate_fn=keys_of)
    assert sorted(chain(*loader)) == KEPT


def test_rest_of_a_filtered_epoch_is_read_by_other_ranks(make: Make) -> None:
    """Given the states of all, which came differently far; then by others again."""
    taken: list[str] = []
    states: list[Any] = []
    for ranks, batches in ((2, 1), (3, 0), (1, 1), (2, 100)):
        following = []
        for rank in range(ranks):
            loader = load(
                make(even=None, rank=rank, world_size=ranks).filter(is_kept), num_workers=0
            )
            if states:
                loader.load_state_dict(states)
            iterator = iter(loader)
            taken += chain(*islice(iterator, batches + rank % 2))
            following.append(saved(loader))
        states = following
    assert sorted(taken) == KEPT


def test_filter_can_be_added_and_removed_in_an_epoch(make: Make) -> None:
    """A state says which places were passed, whatever was left out of them."""
    loader = load(make(), num_workers=0)
    taken = list(chain(*islice(iter(loader), 5)))
    filtered = load(make().filter(is_kept), num_workers=0)
    filtered.load_state_dict(saved(loader))
    iterator = iter(filtered)
    kept = list(chain(*islice(iterator, 3)))
    whole = load(make(), num_workers=0)
    whole.load_state_dict(saved(filtered))
    rest = list(chain(*whole))
    order = list(chain(*load(make(), num_workers=0)))
    assert taken == order[: len(taken)]
    passed = len(order) - len(rest)
    assert rest == order[passed:]
    assert kept == [key for key in order[len(taken) : passed] if key in KEPT]


LEFT_OUT: list[dict[str, Any]] = [
    {"on_error": ignore_and_continue},
    {"members": "jpg", "missing": "skip"},
    {"even": None, "filter": is_kept},
]


@pytest.mark.parametrize("options", [{}, *LEFT_OUT])
def test_state_of_one_rank_is_enough_only_if_no_sample_is_left_out_before_batching(
    make: Make, options: dict[str, Any]
) -> None:
    """Ranks of which some leave out more read on from other places; the error says what to load."""

    def loader(rank: int) -> Any:
        further = dict(options)
        kept = further.pop("filter", None)
        dataset = make(rank=rank, world_size=2, **further)
        return load(by_length(dataset if kept is None else dataset.filter(kept)), num_workers=0)

    resumed = loader(1)
    resumed.load_state_dict(saved(loader(0)))
    if options:
        with pytest.raises(ConfigError, match="states of all ranks"):
            resumed.state_dict()
    else:
        assert saved(resumed) == saved(loader(1))


def test_a_rank_that_has_ended_stays_at_its_end(make: Make) -> None:
    """Its state, loaded and saved again, still says so until all ranks have ended."""

    def loader_of(rank: int) -> Any:
        return load(make(even=None, rank=rank, world_size=2).filter(is_kept), num_workers=0)

    states = []
    for rank in range(2):
        loader = loader_of(rank)
        list(loader)
        states.append(saved(loader))
    again = loader_of(0)
    again.load_state_dict([states[0], {**states[1], "ended": False}])
    assert list(again) == []
    assert saved(again)["ended"]
    both = loader_of(0)
    both.load_state_dict([saved(again), states[1]])
    following = loader_of(0)
    following.set_epoch(1)
    assert both.epoch == 1
    assert list(both) == list(following)
