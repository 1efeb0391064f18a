"""The ranks that read one dataset together, as far as a process knows them without torch.

`RankGroup` is the group of a reader without torch, whose ranks share nothing. `TorchRankGroup` is
the group of ranks that communicate.
"""

import secrets
from collections.abc import Callable, Mapping

from shardcache.errors import ConfigError
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.environment import ranks_of_environment
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.model_parallelism import refuse_model_parallelism
from shardcache_client.ranks.resharding import refuse_resharding
from shardcache_client.stages.stage import Agree


class Epochs:
    """One rank's count of epochs: its iterations read one epoch after another.

    This class knows no other ranks, so it decides nothing and records nothing. `AgreedEpochs` is
    the count on which all ranks agree.
    """

    def follows(self, epoch: int, ended: int, *, is_held: bool = False) -> int:
        """Return the epoch that follows one that was ended early. May block unless `is_held`.

        Args:
            epoch: the epoch that follows by this rank's own count.
            ended: the epoch that this rank has ended early.
            is_held: True if the iterator of `ended` still exists and may be read on.
        """
        return epoch

    def begin(self, epoch: int | None) -> None:
        """Record that this rank reads an epoch, beyond a look at its first batch.

        Args:
            epoch: number of the epoch; None for an epoch that the user has set.
        """

    def leave(self, epoch: int) -> None:
        """Record that this rank has ended an epoch early."""

    def end(self, epoch: int) -> None:
        """Record that this rank has read an epoch to its end."""


class RankGroup:
    """Ranks that know their number and share nothing.

    Each rank resolves its own manifest and counts its own epochs.

    Attributes:
        named_ranks: the ranks that the user named; None for the ranks of the launcher.
        settled: True if all ranks have the manifest of rank 0.
    """

    settled = False

    def __init__(self, named_ranks: Topology | MeshRanks | None) -> None:
        self.named_ranks = named_ranks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topology()!r})"

    @property
    def ranks(self) -> Topology:
        """Rank for which this process reads."""
        if isinstance(self.named_ranks, MeshRanks):
            return self.named_ranks.ranks
        return self.named_ranks or self.ranks_of_job

    @property
    def alone(self) -> bool:
        """True if no other process has to agree with this one.

        All ranks of the job have to agree, even those outside a mesh, unless the user has named
        the ranks by their numbers.
        """
        if isinstance(self.named_ranks, Topology):
            return self.named_ranks.world_size == 1
        return self.ranks_of_job.world_size == 1

    @property
    def ranks_of_job(self) -> Topology:
        """Rank of the process in its job, which the ranks that the user named do not change."""
        return ranks_of_environment()

    def refuse_resharding(self) -> None:
        """Raise ConfigError if samples are divided twice, or among ranks that must share them."""
        if self.named_ranks is None and not self.alone:
            refuse_model_parallelism()
        processes = self.ranks if isinstance(self.named_ranks, MeshRanks) else self.ranks_of_job
        refuse_resharding(self.topology(), processes.world_size)

    def topology(self) -> Topology:
        """Return the present place of this process among the readers of the job."""
        return self.ranks

    def settle(self, resolve: Callable[[], Manifest]) -> Manifest:
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

    def compare(self, manifest: Manifest, *, counted: bool) -> None:
        """Raise ManifestMismatchError if another rank is known to read other shards."""

    def compare_options(self, options: Mapping[str, object]) -> None:
        """Raise RanksError if another rank is known to have other options for the order."""

    def of_copy(self, name: str = "") -> "RankGroup":
        """Return the group of a copy of the dataset, with epochs of its own."""
        return self

    def agreements(self, what: str, timeout_s: float) -> Callable[[Topology], Agree]:
        """Return a function that gives a reader its agreement for one iteration.

        The function returns the reader's agreement with the same worker of all other ranks. It
        raises ConfigError if the ranks share no key-value store. All ranks must call this method in
        the same order.

        Args:
            what: subject of the agreement, in words that are the same on all ranks.
            timeout_s: maximum time for which a reader waits for the others.
        """
        return _agreement_of_one

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the count of epochs on which all ranks agree.

        Args:
            batches: options of the batches that must be the same on all ranks, by name.
        """
        return Epochs()


def _agreement_of_one(reader: Topology) -> Agree:
    """Return the agreement of a single rank. Raises ConfigError if there are several."""
    if reader.world_size > 1:
        raise ConfigError(
            f"{reader.world_size} ranks that share no key-value store cannot agree on how many "
            "items each gets",
            remedy="use a ShardDataset, in a job of torch.distributed",
        )
    return _own_value


def _own_value(name: str, value: int) -> int:
    """Return the greatest value of all ranks if there is only one rank: its own value."""
    return value
