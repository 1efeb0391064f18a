"""Jobs: the numbers of their readers, their progress and their waits.

A job is what `shardcache status` shows of one training: all readers with the same job name and
user. Waits are charged to a job with their causes, which follow from the stages of transfers.
"""

from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.waiting.stages import Stage, Stages
from shardcache.cache.waiting.waits import JobKey
from shardcache.shared.units import user_name

# The cause to which a wait is charged, by the stage of the transfer that the reader waits for. The
# causes are names in the JSON of `shardcache status`.
_WAIT_CAUSES = {
    Stage.ASKING: "network_s",
    Stage.NETWORK: "network_s",
    Stage.SPACE: "space_s",
    Stage.DISK: "disk_s",
}


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader, which takes batches from its workers in turn.

    Attributes:
        name: name that is unique among the loaders of the rank's process.
        rank: number of the rank.
        batch_size: number of samples in a batch.
    """

    name: str
    rank: int
    batch_size: int


@dataclass(slots=True, eq=False)
class Job:
    """All readers of one job of one user.

    Attributes:
        name: name of the job.
        uid: id of the user.
        sessions: number of connected readers.
        shards_planned: number of shards in the epochs that the job's readers have begun.
        shards_done: number of shards that were read and released.
        samples_unmatched: number of samples of joined datasets that were read without a partner,
            which is the sample with the same key in another source.
        waited_s: time for which readers had nothing to read, summed over all readers.
        waited_by_cause_s: the same time by its cause: network, space or disk.
    """

    name: str
    uid: int
    sessions: int = 0
    shards_planned: int = 0
    shards_done: int = 0
    samples_unmatched: int = 0
    waited_s: float = 0.0
    waited_by_cause_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(_WAIT_CAUSES.values(), 0.0),
    )

    @property
    def key(self) -> JobKey:
        """Unique key of the job."""
        return self.name, self.uid

    def to_json(self) -> dict[str, Any]:
        """Return the job's entry in `shardcache status`."""
        return {
            "name": self.name,
            "uid": self.uid,
            "user": user_name(self.uid),
            "sessions": self.sessions,
            "shards_planned": self.shards_planned,
            "shards_done": self.shards_done,
            "samples_unmatched": self.samples_unmatched,
            "waited_s": round(self.waited_s, 3),
            "waited": {cause: round(s, 3) for cause, s in self.waited_by_cause_s.items()},
        }

    def charge(self, since_s: float, until_s: float, stages: Stages | None) -> None:
        """Charge a reader's wait to its causes.

        Args:
            since_s: start of the wait, by the monotonic clock.
            until_s: end of the wait, or the present time.
            stages: stages of the transfer that the reader waits for; None if there was none yet.
        """
        waited_s = until_s - since_s
        self.waited_s += waited_s
        unattributed_s = waited_s
        if stages is not None:
            for stage, spent_s in stages.spent_s(since_s, until_s).items():
                self.waited_by_cause_s[_WAIT_CAUSES[stage]] += spent_s
                unattributed_s -= spent_s
        # Before there is a transfer, the origin is being asked for the shard's version.
        self.waited_by_cause_s[_WAIT_CAUSES[Stage.ASKING]] += unattributed_s
