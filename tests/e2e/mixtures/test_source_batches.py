"""Mixtures whose batches are of one source each, read from a real daemon."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import ConfigError
from shardcache_client import Mixture, ShardDataset, ignore_and_continue
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples, write_indexed

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

COUNTS = {"web": (9, 4, 17, 1, 12, 7), "code": (5, 11, 6)}
FIRST = {"web": 0, "code": 100}  # number of a source's first key
BATCH = 4
WEIGHTS = {"web": 2, "code": 1}

Batch = list[tuple[str, str]]
"""Source and key of each sample."""
Make = Callable[..., Mixture]


@pytest.fixture(scope="module")
def indexes(folder: Path) -> dict[str, str]:
    """The index files of two sources."""
    return {
        name: write_indexed(folder / name, counts, first=FIRST[name])
        for name, counts in COUNTS.items()
    }


@pytest.fixture
def make(daemon: Daemon, indexes: dict[str, str]) -> Make:
    """A function that makes the mixture anew, as each process of a job would."""

    def make_mixture(
        batches: Any = "source", samples: int | None = 72, weights: Any = WEIGHTS, **options: Any
    ) -> Mixture:
        chosen: dict[str, Any] = {"socket": daemon.socket, "batch_size": BATCH} | options
        shuffled = {"shuffle": True, "shuffle_window": 3, "seed": 7}
        sources = {
            "web": ShardDataset(indexes["web"], **shuffled, **chosen),
            "code": ShardDataset(indexes["code"], **chosen),
        }
        return Mixture(sources, weights, samples_per_epoch=samples, batches=batches)

    return make_mixture


def read(batches: Any) -> list[Batch]:
    """Return source and key of the samples of each batch."""
    return [[(each["__source__"], each["__key__"]) for each in batch] for batch in batches]


def loader(mixture: Mixture, workers: int = 0, **options: Any) -> Any:
    """Return a loader of lists of samples."""
    return mixture.loader(num_workers=workers, workers="threads", collate_fn=list, **options)


def sources_of(batches: list[Batch]) -> list[str]:
    """Return the source of each batch, which has no other."""
    found = [{source for source, _ in batch} for batch in batches]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


def assert_in_rounds(samples: Batch, name: str) -> None:
    """A source's samples were read once in each round: none twice more often than another."""
    first = FIRST[name]
    keys = [f"{number:06d}" for number in range(first, first + sum(COUNTS[name]))]
    times = Counter(key for source, key in samples if source == name)
    assert times.keys() <= set(keys)
    assert max(times[key] for key in keys) - min(times[key] for key in keys) <= 1


def test_ranks_read_the_same_source_at_a_step(make: Make) -> None:
    """In the proportions of the weights, each sample once in each round, over several epochs."""
    loaders = [loader(make(rank=rank, world_size=2)) for rank in range(2)]
    samples: Batch = []
    for epoch in range(3):
        ranks = [read(each) for each in loaders]
        assert sources_of(ranks[0]) == sources_of(ranks[1])
        assert Counter(sources_of(ranks[0])) == {"web": 6, "code": 3}
        assert make(rank=0, world_size=2).samples_of(epoch) == {"web": 48, "code": 24}
        samples += chain(*chain(*ranks))
    assert_in_rounds(samples, "web")
    assert_in_rounds(samples, "code")


def test_each_rank_takes_its_own_turns(make: Make) -> None:
    """With "rank-source", all ranks together have the proportions, and each of them nearly."""
    ranks = [read(loader(make("rank-source", rank=rank, world_size=3))) for rank in range(3)]
    turns = [sources_of(each) for each in ranks]
    assert Counter(chain(*turns)) == {"web": 12, "code": 6}
    assert len({tuple(each) for each in turns}) > 1
    assert_in_rounds([*chain(*chain(*ranks))], "web")


@pytest.mark.parametrize("batches", ["source", "rank-source"])
def test_epochs_are_whole_batches(make: Make, batches: str) -> None:
    """70 samples on 2 ranks make 9 batches each by padding, or 8 by dropping, without loss."""
    for even, number in (("pad", 9), ("drop", 8)):
        ranks = [loader(make(batches, 70, rank=rank, world_size=2, even=even)) for rank in range(2)]
        assert [len(each) for each in ranks] == [number, number]
        assert [len(each.dataset) for each in ranks] == [number * BATCH, number * BATCH]
        found = [read(each) + read(each) for each in ranks]
        assert [len(each) for each in found] == [2 * number, 2 * number]
        assert {len(batch) for batch in chain(*found)} == {BATCH}
        assert_in_rounds([*chain(*chain(*found))], "code")


def test_rest_without_a_batch_comes_first_in_the_next_epoch(make: Make) -> None:
    """A source of 22 samples has 5 or 6 batches an epoch: each round is read before the next."""
    each = loader(make(samples=None, weights=None))
    epochs = [read(each) for _ in range(6)]
    code = [[key for source, key in chain(*epoch) if source == "code"] for epoch in epochs]
    assert {len(keys) for keys in code} == {20, 24}
    assert sum(map(len, code)) == 6 * 22
    expected = [f"{number % 22 + FIRST['code']:06d}" for number in range(6 * 22)]
    assert sorted([*chain(*code)][:22]) == expected[:22]
    assert_in_rounds([*chain(*chain(*epochs))], "web")


@pytest.mark.parametrize("batches", ["source", pytest.param("rank-source", marks=pytest.mark.slow)])
def test_source_batches_resume_exactly(make: Make, batches: str) -> None:
    """After any number of batches, with any workers, and by skipping, on each of two ranks."""
    for rank in range(2):
        whole = loader(make(batches, rank=rank, world_size=2))
        epochs = read(whole) + read(whole)
        for taken in (2, 5, 8):
            interrupted = loader(make(batches, rank=rank, world_size=2), workers=2)
            assert read(islice(interrupted, taken)) == epochs[:taken]
            state = json.loads(json.dumps(interrupted.state_dict()))
            assert len(json.dumps(state)) < 300
            resumed = loader(make(batches, rank=rank, world_size=2))
            resumed.load_state_dict(state)
            assert read(resumed) + read(resumed) == epochs[taken:]
            skipped = loader(make(batches, rank=rank, world_size=2))
            skipped.skip(taken)
            assert read(skipped) == epochs[taken:9]


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["source", "rank-source"])
def test_source_batches_go_on_with_other_ranks_and_sizes(make: Make, batches: str) -> None:
    """And as mixed ones, and back: nothing is lost or repeated."""
    samples: Batch = []
    state = None
    for kind, ranks, size, steps in [
        (batches, 2, 4, 2),
        (batches, 3, 2, 4),
        ("mixed", 2, 3, 2),
        (batches, 1, 4, None),
        (batches, 2, 3, None),
    ]:
        loaders = [
            loader(make(kind, rank=rank, world_size=ranks, batch_size=size))
            for rank in range(ranks)
        ]
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        found = [read(islice(each, steps)) for each in loaders]
        if kind != "mixed":
            assert [len(sources_of(each)) for each in found] == [len(found[0])] * ranks
        samples += chain(*chain(*found))
        state = json.loads(json.dumps(loaders[0].state_dict()))
    assert len(samples) == 2 * 72
    assert_in_rounds(samples, "web")
    assert_in_rounds(samples, "code")


@pytest.mark.slow
def test_plain_dataloaders_give_batches_of_one_source(make: Make) -> None:
    """The same ones, with any number of workers, if they make batches of this size."""
    epoch = read(loader(make()))
    for workers in (0, 2):
        plain = DataLoader(make(), batch_size=BATCH, num_workers=workers, collate_fn=list)
        assert read(plain) == epoch
        batches = iter(DataLoader(make(), batch_size=3, num_workers=workers, collate_fn=list))
        with pytest.raises(ConfigError, match="makes batches of 3"):
            list(batches)


@pytest.mark.slow
def test_global_batches_are_of_one_source(make: Make) -> None:
    """The same ones on any number of ranks."""

    def job(ranks: int) -> list[Batch]:
        options: dict[str, Any] = {"global_batch_size": 12, "canonical_nodes": 2, "batch_size": 1}
        loaders = [loader(make(rank=rank, world_size=ranks, **options)) for rank in range(ranks)]
        return [[*chain(*parts)] for parts in zip(*map(read, loaders), strict=True)]

    alone = job(1)
    assert Counter(sources_of(alone)) == {"web": 4, "code": 2}
    assert job(2) == alone
    assert job(6) == alone


@pytest.mark.slow
def test_substitutes_are_of_the_same_source(
    daemon: Daemon, indexes: dict[str, str], tmp_path: Path
) -> None:
    """A bad sample is replaced by another of its source, so that batches stay of one."""
    samples = random_samples(12, {"jpg": 50}, first=200)
    samples.insert(3, samples[3])  # two members of one name
    url = write_indexed(tmp_path / "bad", (12, 9), first=200)
    (tmp_path / "bad" / "0.tar").write_bytes(make_tar(samples))
    options: dict[str, Any] = {
        "socket": daemon.socket,
        "batch_size": BATCH,
        "on_error": ignore_and_continue,
    }
    for extra in ({}, {"global_batch_size": 8, "batch_size": 1}):
        chosen = options | extra
        sources = {
            "bad": ShardDataset(url, **chosen),
            "code": ShardDataset(indexes["code"], **chosen),
        }
        mixture = Mixture(sources, {"bad": 1, "code": 1}, samples_per_epoch=48, batches="source")
        batches = read(loader(mixture))
        assert Counter(sources_of(batches)) == {"bad": len(batches) // 2, "code": len(batches) // 2}
        keys = [key for source, key in chain(*batches) if source == "bad"]
        assert len(keys) == 24
        assert "000203" not in keys


def test_options_that_contradict_batches_of_one_source_are_refused(make: Make) -> None:
    """Each error says what to do instead."""
    with pytest.raises(ConfigError, match="even=None"):
        make(even=None)
    with pytest.raises(ConfigError, match="depends on the ranks"):
        make("rank-source", global_batch_size=12, batch_size=1)
    with pytest.raises(ConfigError, match="batch of one source 4"):
        loader(make(), batch_size=8)
    with pytest.raises(ConfigError, match="this mixture is filtered"):
        next(iter(make().filter(bool)))
    with pytest.raises(ConfigError, match="yields groups"):
        next(iter(make().pack(100, len)))
    with pytest.raises(ConfigError, match="batches is 'sources'"):
        make("sources")
