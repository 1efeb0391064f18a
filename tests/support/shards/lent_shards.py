"""A dataset of whole shards that are lent, for tests and measures of the hand-over alone: no daemon, no plan."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shardcache.tarindex import TarIndex, index_tar, write
from shardcache_client.files.buffers import Buffer, pass_on
from shardcache_client.files.slicing import cut
from shardcache_client.sharing.handover import Handover, Loan


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
