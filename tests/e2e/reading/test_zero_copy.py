"""Zero copy under DataLoader: workers send references, and no shard goes while they travel."""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache_client.dataset import ShardDataset
from shardcache_client.sharing.buffer import Buffer
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples, write_shards

SHARDS = 6
SAMPLES = 50


@pytest.fixture(scope="module")
def large(folder: Path) -> str:
    """The pattern of shards whose samples have a label and a large member."""
    source = folder / "large"
    source.mkdir()
    for number in range(SHARDS):
        samples = random_samples(SAMPLES, {"jpg": 5000}, first=number * SAMPLES)
        labelled = [
            sample | {"cls": str(int(sample["__key__"]) % 10).encode()} for sample in samples
        ]
        (source / f"{number}.tar").write_bytes(make_tar(labelled))
    return f"file://{source}/{{0..{SHARDS - 1}}}.tar"


@pytest.mark.slow
def test_the_dataset_hands_over_what_it_reads(daemon: Daemon, large: str) -> None:
    """Two workers mix several shards: samples come once, and only large members as Buffers."""
    urls = large
    keys = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    plain = {
        sample["__key__"]: sample["jpg"] for sample in ShardDataset(urls, socket=daemon.socket)
    }
    dataset = ShardDataset(
        urls, shuffle=True, shuffle_window=3, socket=daemon.socket, zero_copy=True
    )
    found = [
        sample
        for batch in DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
        for sample in batch
    ]
    assert sorted(sample["__key__"] for sample in found) == keys
    assert all(
        type(sample["jpg"]) is Buffer and sample["jpg"] == plain[sample["__key__"]]
        for sample in found
    )
    assert [int(sample["cls"]) for sample in found] == [
        int(sample["__key__"]) % 10 for sample in found
    ]
    assert {type(sample["cls"]) for sample in found} == {bytes}


@pytest.fixture(scope="module")
def described(folder: Path) -> str:
    """The pattern of shards whose samples have two large members."""
    source = folder / "described"
    source.mkdir()
    write_shards(source, 2, SAMPLES, {"jpg": 5000, "json": 6000})
    return f"file://{source}/shard-{{000000..000001}}.tar"


@pytest.mark.parametrize("chosen", first_quick(["jpg", ("JPG", "png")]))
def test_only_the_chosen_members_are_views(
    daemon: Daemon, described: str, chosen: str | tuple[str, ...]
) -> None:
    """All members but those of the chosen extensions are bytes, and every byte is the same."""
    plain = list(ShardDataset(described, socket=daemon.socket))
    dataset = ShardDataset(described, socket=daemon.socket, zero_copy=chosen)
    found = [
        sample
        for batch in DataLoader(dataset, batch_size=8, num_workers=1, collate_fn=list)
        for sample in batch
    ]
    assert found == plain
    assert {(type(sample["jpg"]), type(sample["json"])) for sample in found} == {(Buffer, bytes)}


@pytest.mark.parametrize(
    "method",
    ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))],
)
@pytest.mark.slow
def test_a_hungry_cache_takes_no_shard_that_is_on_its_way(large: str, method: str) -> None:
    """With room for fewer shards than there are, evicted as they are read, two epochs arrive whole.

    Batches of an epoch that was dropped before block nothing.
    """
    keys = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as root,
        Daemon(Path(root), capacity="1.5MB") as small,
    ):
        dataset = ShardDataset(large, socket=small.socket, zero_copy=True, timeout_s=GUARD_S)
        options: dict[str, Any] = {
            "persistent_workers": True,
            "multiprocessing_context": method,
            "collate_fn": list,
        }
        loader = DataLoader(dataset, batch_size=4, num_workers=2, **options)
        assert len(list(islice(loader, 3))) == 3
        for _ in range(2):
            assert sorted(sample["__key__"] for batch in loader for sample in batch) == keys
        assert small.status()["counters"]["evictions"] > 0
