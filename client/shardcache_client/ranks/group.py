"""The ranks that read one dataset together, as far as a process knows of them without torch."""

import secrets
from collections.abc import Callable, Mapping

from shardcache.errors import ConfigError
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.ranks.environment import ranks_of_environment
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.ranks.model_parallelism import refuse_model_parallelism
from shardcache_client.ranks.resharding import refuse_resharding
from shardcache_client.stages.stage import Agree


class Epochs:
    """One rank's count of epochs, by itself: its iterations read one epoch after another."""

    def follows(self, epoch: int, ended: int, *, is_held: bool = False) -> int:
        """Return the epoch that follows one that was ended early. May block unless `is_held`.

        Args:
            epoch: the one that follows by this rank's own count.
            ended: the one that this rank has ended early.
            is_held: True if the iterator of `ended` still exists, and may be read on.
        """
        return epoch

    def begin(self, epoch: int | None) -> None:
        """Note that this rank reads an epoch, beyond a look; None for one that was set."""

    def leave(self, epoch: int) -> None:
        """Note that this rank has ended an epoch early."""

    def end(self, epoch: int) -> None:
        """Note that this rank has read an epoch to its end."""


class RankGroup:
    """Ranks that know their number and share nothing.

    Each resolves its own manifest and counts its own epochs.

    Attributes:
        given: the ranks that the user named; None for the launcher's.
        settled: True if all ranks have the manifest of rank 0.
    """

    settled = False

    def __init__(self, given: Topology | MeshRanks | None) -> None:
        self.given = given

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topology()!r})"

    @property
    def ranks(self) -> Topology:
        """Rank for which this process reads."""
        if isinstance(self.given, MeshRanks):
            return self.given.ranks
        return self.given or self.ranks_of_job

    @property
    def alone(self) -> bool:
        """True if no other process has to agree with this one.

        All ranks of the job have to, those outside of a mesh included.
        """
        if isinstance(self.given, Topology):
            return self.given.world_size == 1
        return self.ranks_of_job.world_size == 1

    @property
    def ranks_of_job(self) -> Topology:
        """Rank of the process in its job, whatever the user named."""
        return ranks_of_environment()

    def refuse_resharding(self) -> None:
        """Raise ConfigError if samples are divided twice, or among ranks that must share them."""
        if self.given is None and not self.alone:
            refuse_model_parallelism()
        processes = self.ranks if isinstance(self.given, MeshRanks) else self.ranks_of_job
        refuse_resharding(self.topology(), processes.world_size)

    def topology(self) -> Topology:
        """Return the place of this process among the readers of the job, as of now."""
        return self.ranks

    def settle(self, resolve: Callable[[], Manifest]) -> Manifest:
        """Return the manifest that all ranks read; `resolve` returns this rank's own."""
        return resolve()

    def draw_seed(self) -> int:
        """Return a random seed, the same on all ranks.

        Raises ConfigError if they cannot agree on one.
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
        """Raise RanksError if another rank is known to have other options of the order."""

    def of_copy(self, name: str = "") -> "RankGroup":
        """Return the group of a copy of the dataset, with epochs of its own."""
        return self

    def agreements(self, what: str, timeout_s: float) -> Callable[[Topology], Agree]:
        """Return a function of a reader, for one iteration.

        It returns the reader's agreement with the same worker of all other ranks, or raises
        ConfigError if they share no key-value store. All ranks call this in the same order.

        Args:
            what: describes what they agree on, in words that are the same on all ranks.
            timeout_s: how long a reader waits for the others.
        """
        return _agreement_of_one

    def epochs(self, batches: Mapping[str, object]) -> Epochs:
        """Return the count of epochs that all ranks agree on.

        They also agree on these options of their batches.
        """
        return Epochs()


def _agreement_of_one(reader: Topology) -> Agree:
    if reader.world_size > 1:
        raise ConfigError(
            f"{reader.world_size} ranks that share no key-value store cannot agree on how many "
            "items each gets",
            remedy="use a ShardDataset, in a job of torch.distributed",
        )
    return _own_value


def _own_value(name: str, value: int) -> int:
    return value
