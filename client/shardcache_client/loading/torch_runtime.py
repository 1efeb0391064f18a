"""The runtime of a program with torch.

A `Runtime` tells the dataset about the program that uses it. In a program with torch, datasets may
be read by DataLoader workers, and ranks communicate over torch's key-value store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import from_numpy
from torch.utils.data import get_worker_info

from shardcache_client.loading.worker_process import prepare_process
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.parts.runtime import Runtime
from shardcache_client.position.iterations import Iteration
from shardcache_client.ranks import torch_group
from shardcache_client.ranks.group import RankGroup
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.resharding import is_called_by_stateful_loader
from shardcache_client.sharing.epoch_counter import EpochCounter
from shardcache_client.stages.pack import Block, Fitted

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


class TorchRuntime(Runtime):
    """A training process of torch, or one of its DataLoader workers."""

    def rank_group(
        self, named_ranks: Topology | MeshRanks | None, urls: Sequence[str], timeout_s: float
    ) -> RankGroup:
        """Return the ranks that read a dataset, which communicate over torch's key-value store.

        Args:
            named_ranks: the ranks that the user gave; None to find them in the environment.
            urls: urls of the dataset, which tell it from other datasets of the job.
            timeout_s: time limit for a wait for other ranks.
        """
        return torch_group.TorchRankGroup(named_ranks, urls, timeout_s)

    def counter(self) -> EpochCounter:
        """Return a new count of epochs, which this process shares with its workers."""
        return EpochCounter(None, torch_group.in_worker)  # None: a new count

    def iteration(self) -> Iteration:
        """Return a new iteration of this process, which may be a DataLoader's worker."""
        worker = get_worker_info()
        if worker is None:
            return Iteration()
        return Iteration(_loader_seed(worker), worker.id, worker.num_workers)

    @property
    def in_worker(self) -> bool:
        """True in a DataLoader worker."""
        return torch_group.in_worker()

    @property
    def is_asked_by_loader(self) -> bool:
        """True in a worker, or if the caller is a StatefulDataLoader without workers."""
        return self.in_worker or is_called_by_stateful_loader()

    def loader_name(self) -> str:
        """Return a name for this worker's loader, unique on this node; "" outside of a worker."""
        worker = get_worker_info()
        if worker is None:
            return ""
        # Two runs may have the same seed, and two containers the same process id. Containers differ
        # in the inode of their PID namespace.
        container = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
        return f"{container}-{os.getppid()}-{_loader_seed(worker)}"

    def prepare(self, handover: Handover | None) -> None:
        """Prepare this process for reading samples; see `prepare_process`."""
        prepare_process(handover)

    def asked_size(self, batch_size: int) -> int:
        """Return the batch size of the DataLoader that asks for a sample.

        Args:
            batch_size: the dataset's own batch size, which is returned if no DataLoader asks.
        """
        # A DataLoader does not pass its batch size to the dataset. The size is found on the call
        # stack, in the first frame outside of this package.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_ours(frame):
            frame = frame.f_back
        # Only torch's fetcher of iterable datasets asks for the samples of a batch.
        if frame is None or frame.f_code.co_qualname != "_IterableDatasetFetcher.fetch":
            return batch_size
        if not frame.f_locals["self"].auto_collation:  # the DataLoader has batch_size=None
            return 1
        return len(frame.f_locals["possibly_batched_index"])

    def block_of(self, samples: Sequence[Fitted]) -> Block[Any]:
        """Return a block of packed samples, with tensors in place of arrays."""
        block = super().block_of(samples)
        for name in ("cu_seqlens", "positions", "tokens"):
            if name in block:
                block[name] = from_numpy(block[name])
        return block

    def counting_remedy(self, manifest: Manifest) -> str:
        """Return advice that ends the message about uncounted samples; "" for none.

        Once torch.distributed is initialised, all ranks get rank 0's manifest. That helps only if
        the manifest has all counts.
        """
        if manifest.uncounted:
            return ""
        return "; or initialise torch.distributed before creating the dataset"


def _is_ours(frame: FrameType) -> bool:
    """Return True if a frame runs code of this package."""
    module: str = frame.f_globals.get("__name__", "")
    return module.startswith("shardcache_client.")


def _loader_seed(worker: Any) -> int:
    """Return a number that the workers of one DataLoader share: its base seed."""
    return int(worker.seed - worker.id)
