"""Zero copy under DataLoader: workers hand over references, and no shard goes while one of them is on its way."""

from __future__ import annotations

import mmap
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shardcache.errors import ConfigError
from shardcache.store.disk import is_open_elsewhere
from shardcache.tarindex import TarIndex, index_tar, write
from shardcache_client import ShardDataset
from shardcache_client.files.buffers import Buffer, pass_on
from shardcache_client.files.slicing import cut
from shardcache_client.sharing.handover import Handover, Loan
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples, write_shards


class LentShards(IterableDataset[dict[str, Any]]):
    """Every worker reads every n-th shard, and adds to each sample how many loans it holds: `{…, "loans": int}`.

    Args:
        shards: tars, each with the sidecar that `lay_sidecars` made.
        eager: remove each tar as soon as its loan is settled, as the hungriest of caches would.
    """

    def __init__(self, shards: Sequence[Path], *, eager: bool = False) -> None:
        self._shards = shards
        self._eager = eager
        self._handover = Handover()
        self._loans: list[tuple[Loan, Path]] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        default_collate_fn_map[Buffer] = pass_on
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for path in self._shards[worker::workers]:
            self._settle()
            yield from self._samples(path)
        self._settle()

    def _samples(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as tar:
            mapped, inode = mmap.mmap(tar.fileno(), 0, prot=mmap.PROT_READ), path.stat().st_ino
        tables = TarIndex.open(path.with_suffix(".idx"))
        loan = self._handover.lend(mapped, path, inode, str(path))
        self._loans.append((loan, path))
        for sample in cut(tables, loan.columns(tables), str(path), 0, len(tables)):
            yield sample | {"loans": len(self._loans)}

    def _settle(self) -> None:
        self._handover.settle()
        settled = [path for loan, path in self._loans if loan.settled()]
        self._loans = [(loan, path) for loan, path in self._loans if path not in settled]
        for path in settled if self._eager else ():
            path.unlink()


def lay_sidecars(shards: Sequence[Path]) -> None:
    """Index tars, as the daemon does."""
    for path in shards:
        write(path.with_suffix(".idx"), {"size_bytes": path.stat().st_size}, index_tar(path, str(path)))


SHARDS, SAMPLES = 6, 50
SIZES = {"jpg": 5000, "cls": 1}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Six shards and their sidecars."""
    paths = write_shards(tmp_path, SHARDS, SAMPLES, SIZES)
    lay_sidecars(paths)
    return paths


def packed() -> dict[str, bytes]:
    """The jpg of every sample, by key."""
    samples = (sample for number in range(SHARDS) for sample in random_samples(SAMPLES, SIZES, first=number * SAMPLES))
    return {str(sample["__key__"]): bytes(sample["jpg"]) for sample in samples}  # type: ignore[arg-type]


def by_key(batches: Iterable[dict[str, Any]]) -> dict[str, bytes]:
    """The jpg of every sample of collated batches, by key; every one must be a Buffer."""
    found = {}
    for batch in batches:
        assert all(type(value) is Buffer for value in batch["jpg"])
        found |= dict(zip(batch["__key__"], map(bytes, batch["jpg"]), strict=True))
    return found


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_every_byte_arrives_although_shards_go_at_once(shards: list[Path], method: str) -> None:
    """All samples through two workers and torch's own collate, of a cache that removes what it may, when it may."""
    loader = DataLoader(
        LentShards(shards, eager=True), batch_size=8, num_workers=2, multiprocessing_context=method, prefetch_factor=4
    )
    assert by_key(loader) == packed()
    assert len([path for path in shards if not path.exists()]) >= 2


def test_received_samples_outlive_workers_and_files(shards: list[Path]) -> None:
    """Batches that are kept stay right when the epoch has ended, the workers are gone and so are the shards."""
    batches = list(DataLoader(LentShards(shards), batch_size=8, num_workers=2))
    assert not multiprocessing.active_children()
    for path in shards:
        assert is_open_elsewhere(path)
        path.unlink()
    assert by_key(batches) == packed()


def test_the_shards_are_free_with_the_last_batch(shards: list[Path]) -> None:
    """Once nobody holds a value of them, nothing of the hand-over keeps a shard in the cache."""
    for batch in DataLoader(LentShards(shards), batch_size=8, num_workers=2):  # noqa: B007
        assert any(is_open_elsewhere(path) for path in shards)
    del batch
    assert not any(is_open_elsewhere(path) for path in shards)


def test_persistent_workers_settle_what_an_epoch_left(shards: list[Path]) -> None:
    """Over five epochs loans do not pile up: a worker holds that of its shard and those of what is on its way."""
    loader = DataLoader(LentShards(shards), batch_size=8, num_workers=1, persistent_workers=True, prefetch_factor=2)
    for _ in range(5):
        loans = 0
        batches = []
        for batch in loader:
            loans = max(loans, *batch["loans"].tolist())
            batches.append(batch)
        assert by_key(batches) == packed()
        assert loans <= 3


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_dropped_in_mid_epoch(shards: list[Path], persistent: bool) -> None:
    """An undelivered sample blocks nothing: the next epoch is whole, and the shards are free in the end."""
    loader = DataLoader(LentShards(shards), batch_size=8, num_workers=2, persistent_workers=persistent)
    kept = list(islice(loader, 3))
    assert by_key(loader) == packed()
    assert by_key(kept).items() <= packed().items()
    del kept, loader
    assert not any(is_open_elsewhere(path) for path in shards)


@pytest.fixture(scope="module")
def large(folder: Path) -> str:
    """The pattern of shards whose samples have a label and a large member."""
    source = folder / "large"
    source.mkdir()
    for number in range(SHARDS):
        samples = random_samples(SAMPLES, {"jpg": 5000}, first=number * SAMPLES)
        labelled = [sample | {"cls": str(int(sample["__key__"]) % 10).encode()} for sample in samples]
        (source / f"{number}.tar").write_bytes(make_tar(labelled))
    return f"file://{source}/{{0..{SHARDS - 1}}}.tar"


def test_the_dataset_hands_over_what_it_reads(daemon: Daemon, large: str) -> None:
    """Mixed from several shards, by two workers: every sample once, large members as Buffers, small ones as bytes."""
    urls, keys = large, [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    plain = {sample["__key__"]: sample["jpg"] for sample in ShardDataset(urls, socket=daemon.socket)}
    dataset = ShardDataset(urls, shuffle=True, shuffle_window=3, socket=daemon.socket, zero_copy=True)
    found = [sample for batch in DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list) for sample in batch]
    assert sorted(sample["__key__"] for sample in found) == keys
    assert all(type(sample["jpg"]) is Buffer and sample["jpg"] == plain[sample["__key__"]] for sample in found)
    assert [int(sample["cls"]) for sample in found] == [int(sample["__key__"]) % 10 for sample in found]
    assert {type(sample["cls"]) for sample in found} == {bytes}


@pytest.fixture(scope="module")
def described(folder: Path) -> str:
    """The pattern of shards whose samples have two large members."""
    source = folder / "described"
    source.mkdir()
    write_shards(source, 2, SAMPLES, {"jpg": 5000, "json": 6000})
    return f"file://{source}/shard-{{000000..000001}}.tar"


@pytest.mark.parametrize("chosen", ["jpg", ("JPG", "png")])
def test_only_the_chosen_members_are_views(daemon: Daemon, described: str, chosen: str | tuple[str, ...]) -> None:
    """One extension or several: others are bytes whatever their size, and every byte is the same."""
    plain = list(ShardDataset(described, socket=daemon.socket))
    dataset = ShardDataset(described, socket=daemon.socket, zero_copy=chosen)
    found = [sample for batch in DataLoader(dataset, batch_size=8, num_workers=1, collate_fn=list) for sample in batch]
    assert found == plain
    assert {(type(sample["jpg"]), type(sample["json"])) for sample in found} == {(Buffer, bytes)}


def test_an_extension_with_its_dot_is_refused(daemon: Daemon, described: str) -> None:
    """No member would ever match it."""
    with pytest.raises(ConfigError, match=r"zero_copy is '\.jpg'"):
        ShardDataset(described, socket=daemon.socket, zero_copy=".jpg")


def test_a_hungry_cache_takes_no_shard_that_is_on_its_way(large: str) -> None:
    """With room for fewer shards than there are, evicted as they are read, three epochs arrive whole."""
    keys = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]
    with tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as root, Daemon(Path(root), capacity="1.5MB") as small:
        dataset = ShardDataset(large, socket=small.socket, zero_copy=True, timeout_s=GUARD_S)
        loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True, collate_fn=list)
        for _ in range(3):
            assert sorted(sample["__key__"] for batch in loader for sample in batch) == keys
        assert small.status()["counters"]["evictions"] > 0
