"""The program that reads a dataset, as far as the dataset depends on it. Here: without torch.

`torch_runtime` has a program with torch, whose DataLoader workers may be readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.position.iterations import Iteration
from shardcache_client.ranks.group import Epochs, RankGroup
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.sharing.epoch_counter import EpochCounter
from shardcache_client.stages.pack import Block, Fitted, numpy_block

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover


class Runtime:
    """A program without torch, which has no DataLoader workers.

    An object of this class has no state and can be pickled.
    """

    def rank_group(
        self, named_ranks: Topology | MeshRanks | None, urls: Sequence[str], timeout_s: float
    ) -> RankGroup:
        """Return the ranks that read a dataset.

        Args:
            named_ranks: the ranks that the user named; None for the ranks of the launcher.
            urls: urls of the dataset.
            timeout_s: maximum time for which a rank waits for the others.
        """
        return RankGroup(named_ranks)

    def epochs(self, group: RankGroup, deal_options: DealOptions) -> Epochs:
        """Return the count of epochs on which a dataset's ranks agree, or this rank's own count."""
        if deal_options.even is None:
            # Ranks may have different numbers of samples, and so may read different epochs.
            return Epochs()
        return group.epochs(deal_options.common_batch_options())

    def counter(self) -> EpochCounter:
        """Return a count of epochs that this process shares with its workers."""
        return EpochCounter()

    def iteration(self) -> Iteration:
        """Return a new iteration of this process."""
        return Iteration()

    @property
    def in_worker(self) -> bool:
        """True in a DataLoader worker."""
        return False

    @property
    def is_asked_by_loader(self) -> bool:
        """True if a loader, not the user, takes and loads the states of this process.

        Such a loader itself records whether an epoch is over.
        """
        return self.in_worker  # a worker's states are always its loader's

    def loader_name(self) -> str:
        """Return a name for this worker's loader, unique on this node; "" outside of a worker."""
        return ""

    def prepare(self, handover: Handover | None) -> None:
        """Prepare this process for reading samples that a handover passes on."""

    def asked_size(self, batch_size: int) -> int:
        """Return the number of samples in the batches that this process's loader asks for.

        Args:
            batch_size: the dataset's own batch size, which is the result if there is no loader.
        """
        return batch_size

    def block_of(self, samples: Sequence[Fitted]) -> Block[Any]:
        """Return a block of samples, whose arrays are numpy arrays."""
        return numpy_block(samples)

    def counting_remedy(self, manifest: Manifest) -> str:
        """Return advice that ends the message about uncounted samples; "" for none.

        It names another way, besides an index, by which all ranks get the same counts.
        """
        return ""
