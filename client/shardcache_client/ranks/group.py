"""The ranks that read one dataset together, where torch is not used.

A `RankGroup` takes the ranks from the user or the launcher, and its ranks do not communicate. Its
subclass `TorchRankGroup` adds communication over torch's key-value store.
"""

import secrets
from collections.abc import Callable, Mapping

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.environment import ranks_of_environment
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.model_parallelism import refuse_model_parallelism
from shardcache_client.ranks.resharding import refuse_resharding
from shardcache_client.stages.stage import Agree


class Epochs:
    """The epochs of a rank that does not agree on them with other ranks.

    Each iteration reads the next epoch by the dataset's own count, and nothing is recorded. The
    subclass `AgreedEpochs` records what this rank reads, and decides which epoch all ranks read
    next.
    """

    def epoch_after(self, ended: int, *, counted_next: int, is_held: bool = False) -> int:
        """Return the epoch to read after one that was ended early.

        In `AgreedEpochs`, this may wait for the other ranks to end the same epoch.

        Args:
            ended: the epoch that this rank has ended early.
            counted_next: the next epoch by the dataset's own count.
            is_held: True if the user still has the iterator of `ended`, and may read on. Then this
                does not wait.
        """
        return counted_next

    def begin(self, epoch: int | None) -> None:
        """Record that this rank reads an epoch.

        Not called if a program takes only the first batch, to look at it.

        Args:
            epoch: number of the epoch; None for an epoch that the user has set.
        """

    def leave(self, epoch: int) -> None:
        """Record that this rank has ended an epoch early."""

    def end(self, epoch: int) -> None:
        """Record that this rank has read an epoch to its end."""


class RankGroup:
    """Ranks that know their number and do not communicate.

    Each rank resolves its own manifest, which is the list of the dataset's shards, and counts its
    own epochs.

    Attributes:
        named_ranks: the ranks that the user named; None for the ranks of the launcher.
        has_manifest_of_rank_0: True if all ranks have the manifest of rank 0.
        may_join_other_shards: True if ranks may nevertheless have joined different shards to it.
    """

    has_manifest_of_rank_0 = False
    may_join_other_shards = False

    def __init__(self, named_ranks: Topology | MeshRanks | None) -> None:
        self.named_ranks = named_ranks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topology()!r})"

    @property
    def ranks(self) -> Topology:
        """The rank for which this process reads, and the number of ranks that divide samples.

        This is what the user has named, or else the process's rank in its job.
        """
        if isinstance(self.named_ranks, MeshRanks):
            return self.named_ranks.ranks
        return self.named_ranks or self.ranks_of_job

    @property
    def is_alone(self) -> bool:
        """True if no other process has to agree with this one.

        All ranks of the job have to agree, even those outside a mesh, unless the user has named
        the ranks by their numbers.
        """
        if isinstance(self.named_ranks, Topology):
            return self.named_ranks.world_size == 1
        return self.ranks_of_job.world_size == 1

    @property
    def ranks_of_job(self) -> Topology:
        """The process's rank in its job, and the number of ranks; not what the user has named."""
        return ranks_of_environment()

    def refuse_resharding(self) -> None:
        """Raise ConfigError for two mistakes in dividing samples among ranks.

        1. The ranks hold parts of one model, and have to read the same samples.
        2. Another library, which sees one dataset in each process, divides the samples again.
        """
        if self.named_ranks is None and not self.is_alone:
            refuse_model_parallelism()
        # The processes that would divide the samples again are those of the mesh, if there is one.
        processes = self.ranks if isinstance(self.named_ranks, MeshRanks) else self.ranks_of_job
        refuse_resharding(self.topology(), processes.world_size)

    def topology(self) -> Topology:
        """Return the number of this process among the readers of the job, as it is now.

        Without torch, the readers are the ranks. With torch, each DataLoader worker is a reader.
        """
        return self.ranks

    def agree_on_manifest(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return the manifest that all ranks read; `resolve` returns this rank's own."""
        return resolve()

    def draw_seed(self) -> int:
        """Return a random seed that is the same on all ranks.

        Raises ConfigError if the ranks cannot agree on a seed.
        """
        if self.ranks.world_size > 1:
            raise ConfigError(
                f"with seed=None, each of {self.ranks.world_size} ranks would draw a "
                "seed of its own, because they share no key-value store",
                remedy="give a seed; or initialise torch.distributed before creating the "
                "ShardDataset",
            )
        return secrets.randbits(32)

    def compare_manifest(self, manifest: Manifest, *, counted: bool) -> None:
        """Raise ManifestMismatchError if another rank reads other shards.

        No-op here: ranks that do not communicate cannot compare anything.

        Args:
            manifest: the shards that this rank reads.
            counted: True if the numbers of samples have to agree as well.
        """

    def compare_options(self, options: Mapping[str, object]) -> None:
        """Raise RanksError if another rank has other options for the order. No-op here."""

    def of_copy(self, name: str = "") -> "RankGroup":
        """Return the group for a copy of the dataset. Here it is the same group.

        Args:
            name: name of the copy, by which ranks that communicate tell its epochs from those of
                other copies.
        """
        return self

    def agreements(self, subject: str, timeout_s: float) -> Callable[[Topology], Agree]:
        """Return a function that makes a reader's `Agree` for one iteration.

        A reader calls an `Agree` with a name and a value. It returns the greatest value that the
        same worker of any rank has passed under this name. All ranks must call this method in the
        same order. The returned function raises ConfigError if the ranks share no key-value store.

        Args:
            subject: subject of the agreement, in words that are the same on all ranks.
            timeout_s: maximum time for which a reader waits for the others.
        """
        return _agreement_of_one

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the agreement of the ranks on epochs. Here each rank counts its own.

        Args:
            batches: options of the batches that must be the same on all ranks, by name.
        """
        return Epochs()


def _agreement_of_one(reader: Topology) -> Agree:
    """Return the `Agree` of a single rank. Raises ConfigError if there are several ranks."""
    if reader.world_size > 1:
        raise ConfigError(
            f"{reader.world_size} ranks that share no key-value store cannot agree on how many "
            "items each gets",
            remedy="use a ShardDataset, in a job of torch.distributed",
        )
    return _own_value


def _own_value(name: str, value: int) -> int:
    """Return `value`, the greatest of all ranks: there is only one. This is an `Agree`."""
    return value
