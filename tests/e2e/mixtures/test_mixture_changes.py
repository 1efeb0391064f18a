"""Mixtures that change between two batches, by way of a state, read from a real daemon."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError
from shardcache_client import Mixture, ShardDataset, batch_by_length
from support.programs.daemon import Daemon
from support.shards.tars import write_indexed

# torchdata 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

COUNTS = {"web": (9, 4, 17, 1, 12, 7), "code": (5, 11, 6), "math": (8, 3, 9, 4)}
FIRST = {"web": 0, "code": 100, "math": 200}  # number of a source's first key
BATCH = 4
SAMPLES = 72  # of an epoch: whole batches on 1, 2 and 3 ranks

Read = list[tuple[str, str]]
"""Source and key of each sample."""
Make = Callable[..., Mixture]


@pytest.fixture(scope="module")
def indexes(folder: Path) -> dict[str, str]:
    """The index files of three sources."""
    return {
        name: write_indexed(folder / name, counts, first=FIRST[name])
        for name, counts in COUNTS.items()
    }


@pytest.fixture
def make(daemon: Daemon, indexes: dict[str, str]) -> Make:
    """A function that makes a mixture of the sources that have weights, as each process would.

    The samples of "code" come in file order, those of the others are shuffled.
    """

    def make_mixture(
        weights: dict[str, float],
        samples: int = SAMPLES,
        batches: Any = "mixed",
        seed: int | None = 7,
        **options: Any,
    ) -> Mixture:
        chosen = {"socket": daemon.socket, "batch_size": BATCH} | options
        shuffled: dict[str, Any] = {"shuffle": True, "shuffle_window": 3, "seed": seed}
        sources = {
            name: ShardDataset(indexes[name], **({} if name == "code" else shuffled), **chosen)
            for name in weights
        }
        return Mixture(sources, weights, samples_per_epoch=samples, batches=batches)

    return make_mixture


def read(batches: Any) -> Read:
    """Return source and key of the samples of batches."""
    return [(each["__source__"], each["__key__"]) for each in chain.from_iterable(batches)]


def loader(mixture: Mixture, workers: int = 0, **options: Any) -> Any:
    """Return a loader of lists of samples."""
    return mixture.loader(num_workers=workers, workers="threads", collate_fn=list, **options)


def kept(state: Any) -> Any:
    """Return a state as a checkpoint gives it back."""
    return json.loads(json.dumps(state, sort_keys=True))


def on_ranks(
    make: Callable[[int], Mixture], ranks: int, state: Any, steps: int | None
) -> tuple[Read, Any]:
    """Return what ranks read in some steps or the rest of the epoch, and the first's state."""
    loaders = [loader(make(rank)) for rank in range(ranks)]
    if state is not None:
        for each in loaders:
            each.load_state_dict(state)
    found = [read(islice(each, steps)) for each in loaders]
    return [*chain.from_iterable(found)], kept(loaders[0].state_dict())


def assert_in_rounds(samples: Read, name: str) -> None:
    """A source's samples were read once in each round: none twice more often than another."""
    first = FIRST[name]
    keys = [f"{number:06d}" for number in range(first, first + sum(COUNTS[name]))]
    times = Counter(key for source, key in samples if source == name)
    assert times.keys() <= set(keys)
    rounds = {times[key] for key in keys}
    assert max(rounds) - min(rounds) <= 1


@pytest.mark.slow
def test_sources_go_on_where_they_were_on_other_ranks(make: Make) -> None:
    """A source that is new or comes back, on 2, 3 and 1 ranks, loses and repeats nothing."""
    samples: Read = []
    state = None
    for weights, ranks, steps in [
        ({"web": 2, "code": 1}, 2, 3),
        ({"web": 1, "code": 3}, 3, 2),
        ({"code": 1, "math": 5}, 1, 3),
        ({"web": 1, "code": 0, "math": 2}, 2, None),
        ({"web": 5, "math": 1}, 2, None),
        ({"code": 2, "web": 1, "math": 1}, 1, None),
    ]:
        more, state = on_ranks(
            lambda rank, w=weights, n=ranks: make(w, rank=rank, world_size=n), ranks, state, steps
        )
        samples += more
    assert state["epoch"] == 2
    assert state["over"] is True
    assert len(samples) == 3 * SAMPLES
    for name in COUNTS:
        assert_in_rounds(samples, name)


@pytest.mark.slow
def test_change_takes_effect_from_the_next_batch(make: Make) -> None:
    """The new proportions hold at once, and the samples of a source keep their order."""
    before = loader(make({"web": 1, "code": 1}))
    first = read(islice(before, 4))
    after = loader(make({"web": 0, "code": 1}))
    after.load_state_dict(kept(before.state_dict()))
    second = read(islice(after, 4))
    assert [source for source, _ in second] == ["code"] * 16
    code = [int(key) - FIRST["code"] for source, key in first + second if source == "code"]
    assert code == [number % 22 for number in range(24)]
    assert after.remaining == 10


def test_added_source_begins_at_its_beginning(make: Make) -> None:
    """And the epoch is as long as it was, whatever the next ones are."""
    before = loader(make({"web": 1, "code": 1}))
    first = read(islice(before, 10))
    after = loader(make({"web": 1, "code": 1, "math": 2}, samples=40))
    after.load_state_dict(kept(before.state_dict()))
    rest = read(after)
    following = read(after)
    assert len(first) == 40
    assert len(rest) == SAMPLES - 40
    assert len(following) == 40
    math = [key for source, key in rest if source == "math"]
    assert len(math) == 16
    alone = loader(make({"math": 1}, samples=16))
    assert math == [key for _, key in read(alone)]


@pytest.mark.slow
def test_change_and_back_is_no_loss(make: Make) -> None:
    """States are of a few numbers, and of fewer once all has been read that the changes left."""
    samples: Read = []
    state = None
    for weights in ({"web": 3, "code": 1}, {"code": 1}, {"web": 3, "code": 1}):
        each = loader(make(weights))
        if state is not None:
            each.load_state_dict(state)
        samples += read(islice(each, 4))
        state = kept(each.state_dict())
    last = loader(make({"web": 3, "code": 1}))
    last.load_state_dict(state)
    assert [*last.state_dict()["changed"]["sections"]]
    assert len(json.dumps(state)) < 900
    for _ in range(4):
        samples += read(last)
    assert "sections" not in last.state_dict()["changed"]
    assert_in_rounds(samples, "web")
    assert_in_rounds(samples, "code")


def test_state_of_a_changed_mixture_resumes_exactly(make: Make) -> None:
    """A run without further changes gets the very next batch and epoch, from any loader."""
    weights = {"web": 1, "code": 3, "math": 1}
    before = loader(make({"web": 2, "code": 1}))
    list(islice(before, 5))
    state = kept(before.state_dict())

    def changed() -> Any:
        each = loader(make(weights))
        each.load_state_dict(state)
        return each

    whole = changed()
    rest = read(whole)
    following = read(whole)
    for taken in (2, 6, 12):
        interrupted = changed()
        assert read(islice(interrupted, taken)) == rest[: taken * BATCH]
        resumed = loader(make(weights), workers=2)
        resumed.load_state_dict(kept(interrupted.state_dict()))
        assert [*read(resumed), *read(resumed)] == [*rest[taken * BATCH :], *following]


def test_states_of_a_mixture_are_small_until_it_changes(make: Make) -> None:
    """Below 300 bytes, with what tells sources apart."""
    each = loader(make({"web": 2, "code": 1}))
    list(islice(each, 7))
    state = each.state_dict()
    assert len(json.dumps(state)) < 300
    assert [name for name, _ in state["mixed"]] == ["web", "code"]


def test_states_of_earlier_releases_are_read(make: Make) -> None:
    """They do not tell sources apart, and resume exactly with the same ones or other weights."""
    weights = {"web": 2, "code": 1}
    before = loader(make(weights))
    first = read(islice(before, 7))
    state = kept(before.state_dict())
    del state["mixed"]
    same = loader(make(weights))
    same.load_state_dict(state)
    assert first + read(same) == read(loader(make(weights)))
    changed = loader(make({"web": 0, "code": 1}))
    changed.load_state_dict(state)
    assert {source for source, _ in read(changed)} == {"code"}
    with pytest.raises(ConfigError, match="another dataset"):
        loader(make({"code": 1, "web": 2, "math": 1})).load_state_dict(state)


def test_change_at_the_end_of_an_epoch_begins_the_next(make: Make) -> None:
    """The sources begin it where the last one ended."""
    before = loader(make({"web": 1, "code": 2}))
    first = read(before)
    after = loader(make({"web": 1, "code": 2, "math": 3}))
    after.load_state_dict(kept(before.state_dict()))
    assert after.epoch == 1
    assert after.remaining == len(after) == SAMPLES // BATCH
    second = read(after)
    for name in COUNTS:
        assert_in_rounds(first + second, name)


def test_samples_of_counts_what_a_change_has_left(make: Make) -> None:
    """Of the epoch that was being read, and by the new weights afterwards."""
    before = loader(make({"web": 1, "code": 1}))
    list(islice(before, 6))
    mixture = make({"web": 1, "code": 3})
    mixture.load_state_dict(kept(before.state_dict()))
    assert mixture.samples_of(0) == {"web": 12, "code": 36}
    assert mixture.samples_of(1) == {"web": 18, "code": 54}
    assert Counter(source for source, _ in read(loader(mixture))) == {"web": 12, "code": 36}


def test_seeds_that_were_drawn_stay_with_their_sources(make: Make) -> None:
    """Also of one that is left out for a while; a new one draws its own."""
    weights: Sequence[dict[str, float]] = [
        {"web": 1, "code": 1},
        {"code": 1, "math": 1},
        {"web": 1, "math": 1},
    ]
    samples: Read = []
    state = None
    for each in weights:
        run = loader(make(each, seed=None))
        if state is not None:
            run.load_state_dict(state)
        samples += read(islice(run, 5))
        state = kept(run.state_dict())
    last = loader(make(weights[-1], seed=None))
    last.load_state_dict(state)
    samples += read(last) + read(last)
    assert_in_rounds(samples, "web")
    assert_in_rounds(samples, "math")


def test_another_source_of_a_known_name_is_refused(make: Make) -> None:
    """Its position would be that of the other one."""
    before = loader(make({"web": 1, "code": 1}))
    list(islice(before, 2))
    state = kept(before.state_dict())
    with pytest.raises(ConfigError, match="source 'web' is not the one of this name"):
        make({"web": 1, "code": 1}, seed=8).load_state_dict(state)
    with pytest.raises(ConfigError, match="another dataset"):
        make({"math": 1}).load_state_dict(state)


def test_refused_state_leaves_the_mixture_as_it_was(make: Make) -> None:
    """It reads on as if no state had been loaded."""
    before = loader(make({"web": 1, "code": 1}))
    list(islice(before, 2))
    mixture = make({"web": 1, "math": 1}, seed=8)
    with pytest.raises(ConfigError, match="source 'web'"):
        mixture.load_state_dict(kept(before.state_dict()))
    assert read(loader(mixture)) == read(loader(make({"web": 1, "math": 1}, seed=8)))


def test_uneven_ranks_change_by_the_states_of_all(make: Make) -> None:
    """Once one has ended, its state alone does not tell where the others are."""
    weights = {"web": 1, "code": 1}
    ranks = [make(weights, 71, rank=rank, world_size=2, even=None) for rank in range(2)]
    samples = read([[*ranks[0]], [*islice(ranks[1], 28)]])
    states = [kept(each.state_dict()) for each in ranks]
    after = make({"web": 1, "code": 1, "math": 1}, 71, even=None)
    with pytest.raises(ConfigError, match="the states of some ranks"):
        after.load_state_dict(states[0])
    after.load_state_dict(states)
    each = loader(after)
    samples += read(each) + read(each)
    for name in COUNTS:
        assert_in_rounds(samples, name)


def test_filtered_mixtures_change_by_the_states_of_all(make: Make) -> None:
    """Samples that a filter left out are not read again."""

    def is_even(sample: dict[str, Any]) -> bool:
        return int(sample["__key__"]) % 2 == 0

    def mixture(weights: dict[str, float], **options: Any) -> Mixture:
        return make(weights, even=None, **options).filter(is_even)

    loaders = [loader(mixture({"web": 1, "code": 1}, rank=rank, world_size=2)) for rank in range(2)]
    samples = [*chain.from_iterable(read(islice(each, 2)) for each in loaders)]
    after = loader(mixture({"web": 3, "code": 1}))
    with pytest.raises(ConfigError, match="states of all ranks"):
        after.load_state_dict(kept(loaders[0].state_dict()))
    after.load_state_dict([kept(each.state_dict()) for each in loaders])
    samples += read(after) + read(after)
    times = Counter(key for source, key in samples if source == "web")
    assert set(times.values()) <= {1, 2}
    assert len(times) == 25


def test_batches_by_length_change_by_the_states_of_all(make: Make) -> None:
    """One rank's state does not tell which samples of their buffers the others have given."""

    def batches(weights: dict[str, float], **options: Any) -> Any:
        return batch_by_length(
            make(weights, **options),
            100,
            lambda sample: 5 + int(sample["__key__"]) % 7,
            sort_buffer=12,
        )

    before = batches({"web": 1, "code": 1})
    samples = read(islice(before, 3))
    state = kept(before.state_dict())
    after = batches({"web": 1, "code": 1, "math": 1})
    after.load_state_dict(state)
    samples += read(after) + read(after)
    for name in COUNTS:
        assert_in_rounds(samples, name)
    state["reader"] = [0, 2, 1]
    with pytest.raises(ConfigError, match="states of all ranks"):
        batches({"web": 1, "code": 1, "math": 1}).load_state_dict(state)


@pytest.mark.slow
def test_workers_of_a_loader_cannot_change_the_mixture(make: Make) -> None:
    """Each has its own state alone; the mixture itself takes the loader's whole state."""

    def stateful(mixture: Mixture) -> Any:
        return StatefulDataLoader(mixture, batch_size=BATCH, num_workers=2, collate_fn=list)

    before = stateful(make({"web": 1, "code": 1}))
    samples = read(islice(before, 5))
    state = before.state_dict()
    refused = stateful(make({"web": 1, "code": 3}))
    refused.load_state_dict(state)
    with pytest.raises(ConfigError, match="load the state into the mixture itself"):
        list(refused)
    mixture = make({"web": 1, "code": 3})
    mixture.load_state_dict(state)
    after = stateful(mixture)
    samples += read(after) + read(after)
    assert_in_rounds(samples, "web")
    assert_in_rounds(samples, "code")


@pytest.mark.slow
def test_global_batches_change_alike_on_any_ranks(make: Make) -> None:
    """The same samples come in each, and the last one of the epoch is filled up."""
    options: dict[str, Any] = {"global_batch_size": 12, "canonical_nodes": 2, "batch_size": 1}
    before = loader(make({"web": 1, "code": 1}, 70, **options))
    samples = read(islice(before, 2))
    state = kept(before.state_dict())

    def after(ranks: int) -> list[Read]:
        loaders = [
            loader(
                make({"web": 1, "code": 1, "math": 2}, 70, rank=rank, world_size=ranks, **options)
            )
            for rank in range(ranks)
        ]
        for each in loaders:
            each.load_state_dict(state)
        steps = zip(*[[*each] for each in loaders], strict=True)
        return [read(step) for step in steps]

    alone = after(1)
    assert len(alone) == 4
    assert [sorted(batch) for batch in after(3)] == [sorted(batch) for batch in alone]
    samples += [*chain.from_iterable(alone)][:46]
    for name in ("web", "code"):
        times = Counter(key for source, key in samples if source == name)
        assert max(times.values()) <= 2


@pytest.mark.slow
def test_running_workers_of_a_dataloader_hear_of_a_change(make: Make) -> None:
    """The mixture loads the state, and workers that have read an epoch go on as new ones would."""
    before = loader(make({"web": 1, "code": 1}))
    list(islice(before, 5))
    state = kept(before.state_dict())
    mixture = make({"web": 0, "code": 1})
    plain = DataLoader(
        mixture, batch_size=BATCH, num_workers=2, collate_fn=list, persistent_workers=True
    )
    assert len(read(plain)) == SAMPLES
    mixture.load_state_dict(state)
    fresh = loader(make({"web": 0, "code": 1}))
    fresh.load_state_dict(state)
    assert read(plain) == read(fresh)
    assert read(plain) == read(fresh)
