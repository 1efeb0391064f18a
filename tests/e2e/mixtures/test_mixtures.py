"""Mixtures of datasets, read from a real daemon."""

import json
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import ConfigError
from shardcache_client import ignore_and_continue
from shardcache_client.dataset import Mixture, ShardDataset
from support.cases import first_quick
from support.programs.daemon import Daemon, eventually
from support.shards.dealt import walk
from support.shards.reading import write_index
from support.shards.tars import make_tar, random_samples, write_indexed

# torchdata 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

COUNTS = {"web": (9, 4, 17, 1, 12, 7), "code": (5, 11, 6)}
FIRST = {"web": 0, "code": 100}  # number of a source's first key
SAMPLES = {name: sum(counts) for name, counts in COUNTS.items()}
KEYS = {name: [f"{FIRST[name] + number:06d}" for number in range(SAMPLES[name])] for name in COUNTS}
BATCH = 4

Read = list[tuple[str, str]]
"""Source and key of each sample."""
Make = Callable[..., Mixture]


def write(folder: Path, name: str, *, bad: int | None = None) -> str:
    """Write a source, perhaps with a broken third sample; return the url of its index."""
    url = write_indexed(folder / name, COUNTS[name], first=FIRST[name])
    if bad is not None:
        samples = random_samples(
            COUNTS[name][bad], {"jpg": 50}, first=FIRST[name] + sum(COUNTS[name][:bad])
        )
        samples.insert(2, samples[2])  # two members of one name
        (folder / name / f"{bad}.tar").write_bytes(make_tar(samples))
    return url


@pytest.fixture(scope="module")
def indexes(folder: Path) -> dict[str, str]:
    """The index files of two sources."""
    return {name: write(folder, name) for name in COUNTS}


@pytest.fixture
def make(daemon: Daemon, indexes: dict[str, str]) -> Make:
    """A function that makes the mixture anew, as each process of a job would."""

    def make_mixture(
        weights: Any = None, samples_per_epoch: int | None = None, **options: Any
    ) -> Mixture:
        chosen: dict[str, Any] = {"socket": daemon.socket, "batch_size": BATCH} | options
        sources = {
            "web": ShardDataset(indexes["web"], shuffle=True, shuffle_window=3, seed=7, **chosen),
            "code": ShardDataset(indexes["code"], **chosen),
        }
        return Mixture(sources, weights, samples_per_epoch=samples_per_epoch)

    return make_mixture


def read(samples: Any) -> Read:
    """Return source and key of samples, or of batches of them."""
    every = chain.from_iterable(each if isinstance(each, list) else [each] for each in samples)
    return [(sample["__source__"], sample["__key__"]) for sample in every]


def loader(mixture: Mixture, workers: int) -> Any:
    """Return a StatefulDataLoader of whole batches."""
    return StatefulDataLoader(mixture, batch_size=BATCH, num_workers=workers, collate_fn=list)


def dealt(mixture: Mixture, epoch: int) -> Read:
    """Return what the order says of a single reader's epoch."""
    names = [(name, number) for name, counts in COUNTS.items() for number in range(len(counts))]
    shards = walk(
        mixture.parts.samples.deal.share(epoch, mixture.topology()),
        [*COUNTS["web"], *COUNTS["code"]],
    )
    return [
        (name, KEYS[name][sum(COUNTS[name][:number]) + sample])
        for (name, number), sample in ((names[shard], sample) for shard, sample in shards)
    ]


@pytest.mark.parametrize(
    "weights",
    first_quick(
        [None, {"web": 1, "code": 3}, {0: {"web": 4, "code": 1}, 1: {"web": 0, "code": 1}}]
    ),
)
def test_readers_read_the_samples_that_a_mixture_assigns(make: Make, weights: Any) -> None:
    """Shards enter in different lanes, yet every sample comes from its own, in order."""
    # Spawned workers get a pickled copy.
    mixture = pickle.loads(pickle.dumps(make(weights, samples_per_epoch=96)))
    epochs = [read(mixture) for _ in range(2)]
    assert epochs == [dealt(mixture, epoch) for epoch in range(2)]
    assert [Counter(name for name, _ in epoch) for epoch in epochs] == [
        Counter(mixture.samples_of(epoch)) for epoch in range(2)
    ]


@pytest.mark.parametrize(("workers", "steps"), [(0, (0, 1, 7, 17)), (2, (0, 7))])
@pytest.mark.slow
def test_mixture_resumes_exactly(make: Make, workers: int, steps: tuple[int, ...]) -> None:
    """After any number of batches the rest is what would have come, and so is the next epoch."""
    whole = loader(make({"web": 2, "code": 1}), workers)
    epochs = [read(whole), read(whole)]
    for taken in steps:
        interrupted = loader(make({"web": 2, "code": 1}), workers)
        assert read(list(islice(interrupted, taken))) == epochs[0][: taken * BATCH]
        resumed = loader(make({"web": 2, "code": 1}), workers)
        resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
        assert [read(resumed), read(resumed)] == [epochs[0][taken * BATCH :], epochs[1]]


def test_lanes_give_back_their_shards(make: Make, daemon: Daemon) -> None:
    """Only two sources' windows are held at the last sample of four readers' rests."""
    states = []
    for rank in range(4):
        mixture = make(rank=rank, world_size=4, even=None)
        list(islice(mixture, 3))
        states.append(mixture.state_dict())
    alone = make(even=None)
    alone.load_state_dict(states)
    samples = iter(alone)
    assert len(list(islice(samples, sum(SAMPLES.values()) - 4 * 3 - 1))) == 59
    eventually(lambda: daemon.leases() <= 3 + 1)
    del samples


def test_state_shows_the_position_in_each_source(make: Make) -> None:
    """By numbers for people to read: where the epoch begins, and how much of it there is."""
    mixture = make({"web": 3, "code": 1}, samples_per_epoch=60)
    list(mixture)
    list(islice(mixture, 30))
    assert mixture.state_dict()["sources"] == {
        "web": {"start": 45, "samples": 45},
        "code": {"start": 15, "samples": 15},
    }


def test_weights_of_later_epochs_may_change_on_resuming(make: Make) -> None:
    """The epoch of the state is read as it was begun."""
    weights = {0: {"web": 2, "code": 1}, 1: {"web": 1, "code": 1}}
    mixture = make(weights)
    list(mixture)
    before = read(islice(mixture, 11))
    state = mixture.state_dict()
    resumed = make(weights | {2: {"web": 1, "code": 9}})
    resumed.load_state_dict(state)
    rest = read(resumed)
    mixture.set_epoch(1)
    assert before + rest == read(mixture)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["web", "code"])
@pytest.mark.parametrize("fault", ["sample", "shard", "decode"])
def test_unreadable_samples_leave_the_others_in_place(
    daemon: Daemon, tmp_path: Path, indexes: dict[str, str], source: str, fault: str
) -> None:
    """A bad sample or shard of one source leaves the others in their order, from any state.

    Its place in the mixture is passed, so the proportions of what follows, and the plan, are those
    of the whole.
    """
    shard = 2 if source == "web" else 1
    lost = KEYS[source][sum(COUNTS[source][:shard]) :][: COUNTS[source][shard]]

    urls = {
        name: write(tmp_path, name, bad=shard if (fault, name) == ("sample", source) else None)
        for name in COUNTS
    }
    if fault == "shard":
        (tmp_path / source / f"{shard}.tar").write_bytes(b"no tar" * 1000)
    spoilt = source if fault == "decode" else ""

    def make(urls: dict[str, str], spoilt: str = "") -> Mixture:
        options: dict[str, Any] = {
            "on_error": ignore_and_continue,
            "even": None,
            "socket": daemon.socket,
        }
        decodes = {name: _decoder(lost[2]) if name == spoilt else None for name in COUNTS}
        web = ShardDataset(
            urls["web"], shuffle=True, shuffle_window=3, decode=decodes["web"], **options
        )
        return Mixture(
            {"web": web, "code": ShardDataset(urls["code"], decode=decodes["code"], **options)}
        )

    gone = lost if fault == "shard" else lost[2:3]
    bad = make(urls, spoilt)
    have = read(bad)
    bad.set_epoch(0)
    for taken in (2, 11, 40):
        before = read(islice(bad, taken))
        resumed = make(urls, spoilt)
        resumed.load_state_dict(bad.state_dict())
        assert before + read(resumed) == have
    assert have == [sample for sample in read(make(indexes)) if sample[1] not in gone]


def _decoder(bad: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == bad:
            raise ValueError("no image")
        return sample

    return decode


def test_ranks_stay_equal_over_bad_samples_of_a_mixture(daemon: Daemon, tmp_path: Path) -> None:
    """Samples of other readers come in the place of those that were skipped."""
    urls = [write(tmp_path, "web", bad=2), write(tmp_path, "code")]
    options: dict[str, Any] = {
        "on_error": ignore_and_continue,
        "world_size": 2,
        "socket": daemon.socket,
    }
    ranks = [
        read(
            Mixture(
                {
                    name: ShardDataset(url, rank=rank, **options)
                    for name, url in zip(COUNTS, urls, strict=True)
                }
            )
        )
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1]) == 36
    assert len(set(chain(*ranks))) == 71


def test_a_reader_of_a_mixture_has_one_plan(make: Make, daemon: Daemon) -> None:
    """One session names the shards of all sources, as prefetching and eviction need."""
    samples = iter(make(job="one plan", epochs=1))
    next(samples)
    (job,) = [job for job in daemon.status()["jobs"] if job["name"] == "one plan"]
    assert job["sessions"] == 1
    assert job["shards_planned"] == sum(map(len, COUNTS.values()))


def test_each_source_has_its_own_members_and_stages(daemon: Daemon, tmp_path: Path) -> None:
    """Members, defaults, `map` and `filter` are the source's; the mixture's stages follow."""
    sources = {}
    for name, options in (
        ("one", {"members": ("a",)}),
        ("two", {"members": ("b", "c"), "missing": {"c": 0}}),
    ):
        (tmp_path / f"{name}.tar").write_bytes(make_tar(random_samples(6, {"a": 5, "b": 7})))
        url = write_index(tmp_path, [6], f"{name}.tar")
        sources[name] = ShardDataset(url, even=None, socket=daemon.socket, **options)
    sources["two"] = sources["two"].filter(lambda sample: sample["__key__"] != "000003").map(sorted)
    mixture = Mixture(sources).map(list)
    read = list(mixture)
    assert read.count(["__key__", "__url__", "a", "__source__"]) == 6
    assert read.count(["__key__", "__source__", "__url__", "b", "c"]) == 5
    assert len(read) == 11
    with pytest.raises(TypeError, match="filter"):
        len(mixture)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"batch_size": 2}, "differ in batch_size"),
        ({"rank": 0, "world_size": 2}, "differ in rank and world_size"),
        ({"on_error": ignore_and_continue}, "differ in on_error"),
        ({"zero_copy": True}, "differ in zero_copy"),
        ({"timeout_s": 1}, "differ in socket, daemon, fallback, timeout_s"),
        ({"samples_per_epoch": 5}, "'code' has samples_per_epoch"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(
    daemon: Daemon, indexes: dict[str, str], option: dict[str, Any], said: str
) -> None:
    """An option that the mixture would otherwise ignore is an error that names it."""
    options: dict[str, Any] = {"urls": indexes["code"], "socket": daemon.socket} | option
    with pytest.raises(ConfigError, match=said):
        Mixture(
            {
                "web": ShardDataset(indexes["web"], socket=daemon.socket),
                "code": ShardDataset(**options),
            }
        )


def test_sources_without_counts_are_refused(daemon: Daemon, tmp_path: Path) -> None:
    """Proportions are numbers of samples; the error says how to count them."""
    (tmp_path / "new.tar").write_bytes(make_tar(random_samples(3)))
    with pytest.raises(ConfigError, match="'new' cannot be mixed: 1 of 1 shards") as caught:
        Mixture({"new": ShardDataset(f"file://{tmp_path}/new.tar", socket=daemon.socket)})
    assert "shardcache index" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="at least one source"):
        Mixture({})
