"""Members that lie apart in each sample: what lies between them is not fetched, if it is large."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import OutdatedError, ShardChangedError
from shardcache_client.dataset import ShardDataset
from shardcache_client.indexed import IndexedShards
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 256 * KIB
PER_SHARD = 8
SHARDS = 2
CHOSEN = ("json", "cls")


def sample_of(number: int, picture_bytes: int) -> dict[str, Any]:
    """Return a sample with a picture between its two small members."""
    chance = random.Random(number)
    return {
        "__key__": f"{number:06d}",
        "json": b'{"number": %d}' % number,
        "jpg": chance.randbytes(picture_bytes),
        "cls": b"%d" % (number % 10),
    }


def samples_with(picture_bytes: int) -> list[dict[str, Any]]:
    """Return the samples of all shards."""
    return [sample_of(number, picture_bytes) for number in range(SHARDS * PER_SHARD)]


def put_dataset(store: Canary, node: Daemon, folder: Path, samples: list[dict[str, Any]]) -> str:
    """Put shards with an index and a table of their samples into a store; return the index's url.

    No part of the shards is cached afterwards.
    """
    urls = []
    for shard in range(SHARDS):
        tar = make_tar(samples[shard * PER_SHARD : (shard + 1) * PER_SHARD])
        urls.append(store.put(f"{shard}.tar", tar))
    out = folder / "index.json"
    ran = shardcache("index", *urls, "-o", out, "--samples", socket=node.socket)
    assert ran.code == 0, ran.err
    store.put("index.samples", (folder / "index.samples").read_bytes())
    for url in urls:
        node.evict(url)
    store.requests.clear()
    return store.put("index.json", out.read_bytes())


def opened(url: str, node: Daemon, **options: Any) -> IndexedShards[Any]:
    """Open a dataset's samples, of which the chosen members are read."""
    dataset = ShardDataset(
        url,
        members=CHOSEN,
        socket=node.socket,
        timeout_s=GUARD_S,
        **options,
    )
    return dataset.indexed()


def chosen_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the chosen members of a sample, and its key."""
    return {name: sample[name] for name in ("__key__", *CHOSEN)}


def without_url(sample: Any) -> dict[str, Any]:
    """Return a sample without its url."""
    return {name: value for name, value in sample.items() if name != "__url__"}


@pytest.fixture
def store() -> Iterator[Canary]:
    with Canary() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with parts of the default size, which fetches no shard whole."""
    flags = ("--listing-ttl-s", "1000", "--scrub-rate", "0", "--whole-from-percent", "100")
    with Daemon(tmp_path, *flags) as running:
        yield running


def test_large_member_between_the_chosen_ones_is_not_fetched(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """Of each sample with 1 MB in between, one or two parts at either end."""
    samples = samples_with(1_000_000)
    url = put_dataset(store, node, tmp_path, samples)
    numbers = [1, 5, 12]

    with opened(url, node) as read:
        found = [without_url(sample) for sample in read[numbers]]
        assert without_url(read[9]) == chosen_of(samples[9])

    assert found == [chosen_of(samples[number]) for number in numbers]
    # The four samples have 4 MB. At most two parts have a small member that is on their border.
    parts = store.asked_bytes(".tar") / PART_BYTES
    assert parts <= 4 * 2 + 2
    eventually(lambda: node.leases() == 0)


def test_small_member_between_the_chosen_ones_is_fetched_with_them(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """By one request for each sample: a second one would cost more than these bytes."""
    samples = samples_with(200_000)
    url = put_dataset(store, node, tmp_path, samples)

    with opened(url, node) as read:
        assert without_url(read[3]) == chosen_of(samples[3])

    assert len(store.ranges(".tar")) == 1


@pytest.mark.slow
def test_every_sample_is_read_in_any_order(store: Canary, node: Daemon, tmp_path: Path) -> None:
    """Alone, in lists, and by a permutation of all samples; from the cache as well."""
    samples = samples_with(600_000)
    url = put_dataset(store, node, tmp_path, samples)
    numbers = list(range(len(samples)))
    random.Random(4).shuffle(numbers)

    with opened(url, node) as read:
        for _ in range(2):
            found = [without_url(sample) for sample in read[numbers]]
            assert found == [chosen_of(samples[number]) for number in numbers]
    shuffled = ShardDataset(
        url,
        members=CHOSEN,
        shuffle="global",
        socket=node.socket,
        timeout_s=GUARD_S,
    )
    found = sorted(map(without_url, shuffled), key=lambda sample: sample["__key__"])
    assert found == list(map(chosen_of, samples))


def test_sample_of_a_replaced_shard_is_an_error(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """Its members are of two versions otherwise; no lease is left behind."""
    samples = samples_with(1_000_000)
    url = put_dataset(store, node, tmp_path, samples)
    other = samples_with(1_000_001)

    with opened(url, node) as read:
        assert without_url(read[0]) == chosen_of(samples[0])
        store.put("0.tar", make_tar(other[:PER_SHARD]))
        with pytest.raises((OutdatedError, ShardChangedError)):
            read[6]
        assert without_url(read[PER_SHARD]) == chosen_of(samples[PER_SHARD])
    eventually(lambda: node.leases() == 0)


@pytest.mark.slow
def test_pieces_of_a_sample_fit_where_nothing_else_does(store: Canary, tmp_path: Path) -> None:
    """Many samples are asked for at a time in a cache of a few parts; none waits for itself."""
    samples = samples_with(1_000_000)
    flags = ("--listing-ttl-s", "1000", "--scrub-rate", "0")
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with Daemon(tmp_path / "first", *flags) as first:
        url = put_dataset(store, first, tmp_path, samples)
    with Daemon(tmp_path / "second", *flags, capacity=str(9 * PART_BYTES)) as small:
        with opened(url, small) as read:
            found = [without_url(sample) for sample in read[list(range(len(samples)))]]
        assert found == list(map(chosen_of, samples))
