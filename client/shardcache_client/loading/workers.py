"""The workers of a loader: threads or processes that make the parts of a rank's work, or nobody but this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from shardcache_client.batches.maker import MadeBatch
from shardcache_client.batches.rank_work import BatchForm, RankWork, Reading
from shardcache_client.loading.processes import ProcessPool
from shardcache_client.loading.tasks import Task

# Of the options of a DataLoader, those that say what its batches are, and not how worker processes make them.
_OF_BATCHES = ("batch_size", "drop_last", "workers", "in_order")
_PREFETCHED = 2  # parts of each worker, as torch's


def use_one_core() -> None:
    """Have torch use one core in this thread, as in a DataLoader's worker: other threads have the other cores."""
    torch.set_num_threads(1)


class Workers:
    """Makers of one task after another.

    Args:
        reading: of the dataset.
        form: of the batches.
        loader: name of the loader.
        options: those of `ShardDataset.loader`, all given.

    Attributes:
        deal: of the samples that parts are made of.
    """

    def __init__(self, reading: Reading, form: BatchForm, loader: str, options: Mapping[str, Any]) -> None:
        self.deal = reading.deal
        self._threads = options["num_workers"] if options["workers"] == "threads" else 0
        self._ahead = options.get("prefetch_factor") or _PREFETCHED
        self._pins = bool(options["pin_memory"])
        self._pool: ProcessPool | None = None
        if options["num_workers"] and not self._threads:
            further = {name: value for name, value in options.items() if name not in _OF_BATCHES}
            self._pool = ProcessPool(reading, form, loader, further)

    @property
    def are_of_this_process(self) -> bool:
        """False in a process that was forked from the one that made this, if there are worker processes."""
        return self._pool is None or self._pool.is_of_this_process

    def made(self, task: Task, work: RankWork, start: int) -> Generator[MadeBatch]:
        """Yield the parts of a task from number `start` on; `work` is the same for this process.

        Raises what making them raises, and torch's errors of the deaths of processes.
        """
        if self._pool is not None:
            return self._pool.made(task, range(start, work.count))
        return work.made(skip=start, threads=self._threads, ahead=self._ahead, begin=use_one_core)

    @property
    def are_any(self) -> bool:
        """True if others than this thread make the parts."""
        return bool(self._threads) or self._pool is not None

    def pinned(self, batch: Any, *, is_made_here: bool = False) -> Any:
        """Return a batch in pinned memory, if that is wanted.

        Args:
            is_made_here: True if this process has collated it, whoever has made its parts.
        """
        # What worker processes have collated is pinned by their DataLoader.
        is_unpinned = self._pool is None or is_made_here
        if self._pins and is_unpinned and torch.accelerator.is_available():
            return pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch
