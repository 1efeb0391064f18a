"""`select`, `subset` and `split`: datasets of some samples, as exact as any other dataset."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ConfigError
from shardcache_client.dataset import Mixture, ShardDataset
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples

COUNTS = (17, 30, 9, 41, 0, 25, 22, 36)
TOTAL = sum(COUNTS)

Make = Callable[..., ShardDataset]


def has_caption(key: str) -> bool:
    """Return True for samples with a caption: none of shard one, all of three, some of others."""
    number = int(key)
    return number >= COUNTS[0] and (number % 3 == 0 or sum(COUNTS[:2]) <= number < sum(COUNTS[:3]))


CHOSEN = [f"{number:06d}" for number in range(TOTAL) if has_caption(f"{number:06d}")]


@pytest.fixture(scope="module")
def train(folder: Path, daemon: Daemon) -> str:
    """The index of shards with some captions, and a table of the samples beside it."""
    source = folder / "select"
    source.mkdir()
    for number, count in enumerate(COUNTS):
        samples = random_samples(count, {"jpg": 300, "txt": 20}, first=sum(COUNTS[:number]))
        kept = [
            {k: v for k, v in one.items() if k != "txt" or has_caption(one["__key__"])}
            for one in samples
        ]
        (source / f"{number}.tar").write_bytes(make_tar(kept))
    ran = shardcache(
        "index", f"{source}/", "-o", source / "index.json", "--samples", socket=daemon.socket
    )
    assert ran.code == 0, ran.err
    return f"file://{source}/index.json"


@pytest.fixture
def make(daemon: Daemon, train: str) -> Make:
    """A function that makes the dataset of the samples with a caption, anew for a rank."""

    def make_dataset(**options: Any) -> ShardDataset:
        return ShardDataset(train, socket=daemon.socket, **options).select(
            lambda entry: "txt" in entry.sizes
        )

    return make_dataset


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"shuffle": True, "shuffle_window": 0}], ids=str
)
def test_selected_samples_come_once_and_alone(make: Make, options: dict[str, Any]) -> None:
    """They come by number or shuffled, each with its members, and the length is exact."""
    dataset = make(**options)
    assert len(dataset) == len(CHOSEN)
    samples = list(dataset)
    assert sorted(keys_of(samples)) == CHOSEN
    assert (keys_of(samples) == CHOSEN) == (not options)
    assert all(len(sample["txt"]) == 20 and len(sample["jpg"]) == 300 for sample in samples)
    assert (keys_of(dataset) == keys_of(samples)) == (not options)


def test_an_index_that_comes_twice_is_selected_from_twice(train: str, daemon: Daemon) -> None:
    """As its samples come twice without a selection."""
    dataset = ShardDataset([train, train], socket=daemon.socket).select(
        lambda entry: "txt" in entry.sizes
    )
    assert keys_of(dataset) == CHOSEN * 2


@pytest.mark.slow
def test_ranks_and_workers_share_a_selection_exactly(make: Make) -> None:
    """Equal numbers on all ranks, padded as always."""
    parts = []
    for rank in range(3):
        dataset = make(shuffle=True, rank=rank, world_size=3, batch_size=4)
        loader = dataset.loader(num_workers=2, collate_fn=keys_of)
        part = [key for batch in loader for key in batch]
        assert len(part) == len(dataset) == -(-len(CHOSEN) // 3)
        parts += part
    assert set(parts) == set(CHOSEN)
    assert len(parts) - len(CHOSEN) < 3


def test_a_selection_resumes_on_other_ranks(make: Make) -> None:
    """Three ranks read the rest of one's epoch once. Other selections refuse the state."""
    dataset = make(shuffle=True, seed=3)
    loader = dataset.loader(batch_size=4, num_workers=2, collate_fn=keys_of)
    begun = [key for batch in islice(loader, 5) for key in batch]
    state = json.loads(json.dumps(loader.state_dict()))
    del loader
    rest = []
    for rank in range(3):
        resumed = make(shuffle=True, seed=3, rank=rank, world_size=3, even=None, batch_size=4)
        resumed.load_state_dict(state)
        rest += keys_of(resumed)
    assert Counter(begun + rest) == Counter(CHOSEN)
    with pytest.raises(ConfigError, match="from another dataset"):
        make(shuffle=True, seed=3).split(0.5, 0.5)[0].load_state_dict(state)


def test_samples_are_selected_by_metadata(train: str, folder: Path, daemon: Daemon) -> None:
    """The table has it, so no shard is read for it, or fetched without a selected sample."""
    source = folder / "metadata"
    source.mkdir()
    for shard in range(3):
        samples = random_samples(20, {"jpg": 300}, first=20 * shard)
        described = [
            one | {"json": json.dumps({"width": int(one["__key__"]), "url": "x"}).encode()}
            for one in samples
        ]
        (source / f"{shard}.tar").write_bytes(make_tar(described[:-1] + samples[-1:]))
    index = source / "index.json"
    ran = shardcache(
        "index",
        f"{source}/",
        "-o",
        index,
        "--samples",
        "--metadata",
        "json:width",
        socket=daemon.socket,
    )
    assert ran.code == 0, ran.err
    (folder / "reader").mkdir()
    with Daemon(folder / "reader") as other:
        dataset = ShardDataset(f"file://{index}", shuffle=True, epochs=1, socket=other.socket)
        wide = dataset.select(lambda entry: entry.metadata.get("width", 0) >= 30)
        other.await_publication()
        assert {shard["url"] for shard in other.shards()} == {f"file://{source}/index.samples"}
        assert sorted(map(int, keys_of(wide))) == [
            number for number in range(30, 60) if number % 20 != 19
        ]
        assert len(wide) == 28
        other.await_publication()
        assert {Path(shard["url"]).name for shard in other.shards()} == {
            "1.tar",
            "2.tar",
            "index.samples",
        }
        bare = dataset.select(lambda entry: not entry.metadata)
        assert keys_of(bare.indexed()) == ["000019", "000039", "000059"]
        with pytest.raises(KeyError, match="url"):
            dataset.select(lambda entry: entry.metadata["url"])
    with pytest.raises(ConfigError, match="has no metadata") as caught:
        ShardDataset(train, socket=daemon.socket).select(lambda entry: entry.metadata)
    assert "index.json --samples --metadata json" in (caught.value.remedy or "")


@pytest.mark.parametrize("by", first_quick(["samples", "shards"]))
def test_split_is_the_same_in_every_process(
    make: Make, train: str, daemon: Daemon, by: Any
) -> None:
    """Its two parts, streamed, shuffled or by number, are disjoint and together all."""
    whole = ShardDataset(train, shuffle=True, socket=daemon.socket)
    parts = [set(keys_of(part)) for part in whole.split(0.8, 0.2, by=by)]
    assert len(parts[0]) + len(parts[1]) == len(parts[0] | parts[1]) == TOTAL
    ranks = [
        ShardDataset(train, socket=daemon.socket, rank=rank, world_size=2, even=None)
        for rank in range(2)
    ]
    assert parts == [
        {key for rank in ranks for key in keys_of(rank.split(0.8, 0.2, by=by)[n])} for n in range(2)
    ]
    assert parts == [set(keys_of(part)) for part in whole.indexed().split(0.8, 0.2, by=by)]
    if by == "samples":
        assert len(parts[1]) == round(TOTAL * 0.2)
        of_first = {int(key) for key in parts[1]} & set(range(COUNTS[0]))
        assert len(of_first) in (3, 4), "a fifth of the first shard"
    validated = whole.split(0.8, 0.2, by=by)[1].select(lambda entry: "txt" in entry.sizes)
    assert set(keys_of(validated)) == parts[1] & set(CHOSEN)
    assert len(validated) == len(parts[1] & set(CHOSEN))


def test_impossible_selections_say_why(
    make: Make, train: str, folder: Path, daemon: Daemon
) -> None:
    """No index, no or a wrong table, no sample left, samples never counted, or a mixture's."""
    source = folder / "select"
    with pytest.raises(ConfigError, match="needs a table of the samples") as caught:
        ShardDataset(f"{source}/*.tar", socket=daemon.socket).select(bool)
    assert "--samples" in (caught.value.remedy or "")
    (source / "alone.json").write_bytes((source / "index.json").read_bytes())
    alone = ShardDataset(str(source / "alone.json"), socket=daemon.socket)
    with pytest.raises(ConfigError, match="which is missing") as caught:
        alone.select(bool)
    assert "alone.samples" in (caught.value.url or "")
    fewer = json.loads((source / "index.json").read_text())
    del fewer["shardlist"][2]
    (source / "fewer.json").write_text(json.dumps(fewer))
    (source / "fewer.samples").write_bytes((source / "index.samples").read_bytes())
    with pytest.raises(ConfigError, match="not match the index file"):
        ShardDataset(str(source / "fewer.json"), socket=daemon.socket).select(bool)
    with pytest.raises(ConfigError, match="no sample is selected"):
        alone.subset([])
    (folder / "uncounted.tar").write_bytes(make_tar(random_samples(2, {"jpg": 5})))
    for choose in (lambda dataset: dataset.split(0.5, 0.5), lambda dataset: dataset.subset([0])):
        with pytest.raises(ConfigError, match="1 of 1 shards were never counted"):
            choose(ShardDataset(f"file://{folder}/uncounted.tar", socket=daemon.socket))
    mixture = Mixture({"captions": make()})
    for choose in (lambda dataset: dataset.select(bool), lambda dataset: dataset.split(0.5, 0.5)):
        with pytest.raises(ConfigError, match="samples of a mixture"):
            choose(mixture)
