"""Objects replaced after they were listed: read anew where that is safe, and else named."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import CountMismatchError, OutdatedError
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples, write_index
from support.stores.buckets import Bucket
from support.stores.faulty_proxy import FaultyProxy

SHARDS = 3
SAMPLES = 6
PART_BYTES = 64 * 1024
REPLACED = 1  # the number of the shard that is replaced

Values = list[bytes]
ORDERS: list[dict[str, Any]] = [
    {"shuffle": False},
    {"shuffle": True, "shuffle_window": 2, "seed": 1},
]
orders = pytest.mark.parametrize("order", first_quick(ORDERS), ids=["in order", "mixed"])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that knows nothing of the shards."""
    with Daemon(tmp_path, "--listing-ttl-s", "3600") as daemon:
        yield daemon


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of shards."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(SHARDS):
        (folder / f"{number}.tar").write_bytes(make_tar(edition(number)))
    return folder


def edition(number: int, seed: int = 0, samples: int = SAMPLES) -> list[dict[str, Any]]:
    """Return the samples of a shard; those of another seed have the same keys and other values."""
    return random_samples(samples, {"jpg": 50}, seed=seed, first=number * SAMPLES)


def replace(folder: Path, **changes: int) -> None:
    """Put another edition of a shard in its place."""
    new = folder / "new"
    new.write_bytes(make_tar(edition(REPLACED, **({"seed": 1} | changes))))
    new.rename(folder / f"{REPLACED}.tar")


def values(dataset: ShardDataset) -> Values:
    """Return the values of a dataset's samples, in the order of their keys."""
    samples = sorted(dataset, key=lambda sample: sample["__key__"])
    return [sample["jpg"] for sample in samples]


def expected(seed: int) -> Values:
    """Return the values of all samples, if one shard has an edition by this seed."""
    shards = [edition(number, seed if number == REPLACED else 0) for number in range(SHARDS)]
    return [sample["jpg"] for shard in shards for sample in shard]


def counted(folder: Path, daemon: Daemon) -> None:
    """Let the daemon count the samples of all shards, and keep none of them."""
    assert values(ShardDataset(f"file://{folder}/", socket=daemon.socket)) == expected(0)
    daemon.empty()


def uncounted(_folder: Path, _daemon: Daemon) -> None:
    """Leave the samples uncounted."""


@pytest.mark.slow
@orders
@pytest.mark.parametrize("prepare", [uncounted, counted])
def test_object_replaced_before_its_first_read_is_read_in_its_new_version(
    folder: Path, daemon: Daemon, order: dict[str, Any], prepare: Callable[[Path, Daemon], None]
) -> None:
    """A new version needs the same number of samples or an order independent of it."""
    prepare(folder, daemon)
    dataset = ShardDataset(f"file://{folder}/", socket=daemon.socket, **order)
    replace(folder)
    assert values(dataset) == expected(1)
    assert values(dataset) == expected(1)


@orders
def test_object_replaced_between_epochs_is_read_in_its_new_version(
    folder: Path, daemon: Daemon, order: dict[str, Any]
) -> None:
    """Once its former version has been evicted; until then, that one is read."""
    dataset = ShardDataset(f"file://{folder}/", socket=daemon.socket, **order)
    assert values(dataset) == expected(0)
    replace(folder)
    assert values(dataset) == expected(0)
    dataset = ShardDataset(f"file://{folder}/", socket=daemon.socket, **order)
    daemon.empty()
    assert values(dataset) == expected(1)


@pytest.mark.slow
@orders
def test_object_replaced_by_one_with_another_count_is_an_error_that_says_so(
    folder: Path, daemon: Daemon, order: dict[str, Any]
) -> None:
    """No sample comes of an order computed for another number; the error has both numbers."""
    counted(folder, daemon)
    dataset = ShardDataset(f"file://{folder}/", socket=daemon.socket, **order)
    replace(folder, samples=SAMPLES - 1)
    with pytest.raises(
        CountMismatchError, match=r"replaced .* since it was listed, and holds 5 samples"
    ) as caught:
        values(dataset)
    assert caught.value.url == f"file://{folder}/{REPLACED}.tar"
    assert caught.value.yielded == 0
    assert "lists the shards again" in caught.value.remedy


@orders
def test_object_whose_samples_other_readers_may_have_is_an_error(
    folder: Path, daemon: Daemon, order: dict[str, Any]
) -> None:
    """A shard that is divided among ranks has one version in an epoch; the error names both."""
    assert values(ShardDataset(f"file://{folder}/{REPLACED}*.tar", socket=daemon.socket))
    daemon.empty()
    options: dict[str, Any] = {"socket": daemon.socket, "world_size": 2, **order}
    url = f"file://{folder}/{REPLACED}*.tar"
    datasets = [ShardDataset(url, rank=rank, **options) for rank in range(2)]
    replace(folder)
    with pytest.raises(OutdatedError, match=r"the origin has version .*, the manifest names"):
        for dataset in datasets:
            values(dataset)


@orders
def test_object_of_an_index_file_is_read_in_the_version_that_it_names(
    folder: Path, daemon: Daemon, order: dict[str, Any]
) -> None:
    """Also by a daemon that has the new version for a job that may read it."""
    dataset = ShardDataset(f"file://{folder}/", socket=daemon.socket, **order)
    write_index(folder, [SAMPLES] * SHARDS)
    listed = json.loads((folder / "index.json").read_text())
    listed["shardlist"][REPLACED]["etag"] = dataset.manifest[REPLACED].version
    (folder / "index.json").write_text(json.dumps(listed))
    strict = ShardDataset(f"file://{folder}/index.json", socket=daemon.socket, **order)
    replace(folder)
    assert values(dataset) == expected(1)
    with pytest.raises(OutdatedError):
        values(strict)


@pytest.mark.slow
@orders
def test_object_replaced_during_its_first_download_is_read_in_its_new_version(
    moto: Bucket, tmp_path: Path, order: dict[str, Any]
) -> None:
    """The old version is refused with a 412 before any sample of it was handed out."""

    def edition_of_large(seed: int) -> list[dict[str, Any]]:
        return random_samples(3, {"jpg": 2 * PART_BYTES}, seed=seed)

    moto.put("data/0.tar", make_tar(edition_of_large(0)))
    with FaultyProxy(moto.env()["AWS_ENDPOINT_URL"]) as proxy:
        flags = ("--part-size", str(PART_BYTES), "--shard-connections", "1")
        with Daemon(tmp_path, *flags, env=proxy.env(moto.env())) as daemon:
            dataset = ShardDataset(f"{moto.url}/data/", socket=daemon.socket, **order)
            new = make_tar(edition_of_large(1))
            proxy.before(lambda: moto.put("data/0.tar", new), key="data/0.tar", start=PART_BYTES)
            assert values(dataset) == [sample["jpg"] for sample in edition_of_large(1)]
