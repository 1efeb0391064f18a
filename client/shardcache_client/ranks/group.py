"""The ranks that read one dataset together, as far as a process knows of them without torch."""

import secrets
from collections.abc import Callable, Mapping

from shardcache.errors import ConfigError
from shardcache_client.order.manifest import Manifest
from shardcache_client.ranks.frameworks import MeshRanks, refuse_model_parallelism, refuse_resharding
from shardcache_client.topology import Ranks, Topology, ranks_of_environment


class Epochs:
    """One rank's count of epochs, by itself: its iterations read one epoch after another."""

    def follows(self, epoch: int, left: int) -> int:
        """Return the epoch after `left`, which this rank has ended early; `epoch` by its own count. May block."""
        return epoch

    def begin(self, epoch: int | None) -> None:
        """Note that this rank reads an epoch, beyond a look; None for one that was set."""

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early."""

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end."""


class RankGroup:
    """Ranks that know their number and share nothing: each resolves its own manifest and counts its own epochs."""

    settled = False  # True if all ranks have the manifest of rank 0

    def __init__(self, given: Ranks | MeshRanks | None) -> None:
        self.given = given  # the ranks that the user named; None for the launcher's

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topology()!r})"

    @property
    def ranks(self) -> Ranks:
        """Rank for which this process reads."""
        return self.given.ranks if isinstance(self.given, MeshRanks) else self.given or self.ranks_of_job

    @property
    def alone(self) -> bool:
        """True if no other process has to agree with this one: ranks outside of a mesh do."""
        return (self.given if isinstance(self.given, Ranks) else self.ranks_of_job).world_size == 1

    @property
    def ranks_of_job(self) -> Ranks:
        """Rank of the process in its job, whatever the user named."""
        return ranks_of_environment()

    def refuse_resharding(self) -> None:
        """Raise ConfigError if samples are divided a second time, or among ranks that must read the same ones."""
        if self.given is None and not self.alone:
            refuse_model_parallelism()
        processes = self.ranks if isinstance(self.given, MeshRanks) else self.ranks_of_job
        refuse_resharding(self.topology(), processes.world_size)

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return Topology(self.ranks.rank, self.ranks.world_size)

    def settle(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return the manifest for all ranks, which `resolve` makes."""
        return resolve()

    def draw_seed(self) -> int:
        """Return a random seed, the same on all ranks. Raises ConfigError if they cannot agree on one."""
        if self.ranks.world_size > 1:
            raise ConfigError(
                f"seed=None would be another seed on each of {self.ranks.world_size} ranks, which share no store",
                remedy="give a seed; or initialise torch.distributed before creating the ShardDataset",
            )
        return secrets.randbits(32)

    def compare(self, manifest: Manifest, *, counted: bool) -> None:
        """Raise ManifestMismatchError if another rank is known to read other shards."""

    def compare_options(self, options: Mapping[str, object]) -> None:
        """Raise RanksError if another rank is known to have other options of the order."""

    def of_copy(self, name: str = "") -> "RankGroup":
        """Return the group of a copy of the dataset, with epochs of its own, known by name or else by order."""
        return self

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the count of epochs that all ranks agree on, if they also agree on these options."""
        return Epochs()
