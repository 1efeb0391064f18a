"""Jobs: their readers, progress and waits, added up."""

from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.waiting.stages import Stage, Stages
from shardcache.cache.waiting.waits import JobKey
from shardcache.shared.units import user_name

_WAIT_CAUSES = {
    Stage.ASKING: "network_s",
    Stage.NETWORK: "network_s",
    Stage.SPACE: "space_s",
    Stage.DISK: "disk_s",
}


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader, which takes batches of `batch_size` samples from its workers in turn."""

    name: str  # unique among the loaders of its rank's process
    rank: int
    batch_size: int


@dataclass(slots=True, eq=False)
class Job:
    """All readers of one job of one user."""

    name: str
    uid: int
    sessions: int = 0  # connected readers
    shards_planned: int = 0  # in the epochs that its readers have begun
    shards_done: int = 0  # read and released
    samples_unmatched: int = 0  # read without one of the same key in the shards joined to theirs
    waited_s: float = 0.0  # with nothing to read, summed over all readers
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
            until_s: its end, or the present.
            stages: those of the transfer that it waits for, once there is one.
        """
        unattributed_s = until_s - since_s
        self.waited_s += unattributed_s
        if stages is not None:
            for stage, spent_s in stages.spent_s(since_s, until_s).items():
                self.waited_by_cause_s[_WAIT_CAUSES[stage]] += spent_s
                unattributed_s -= spent_s
        # Before there is a transfer, the origin is being asked for the shard's version.
        self.waited_by_cause_s[_WAIT_CAUSES[Stage.ASKING]] += unattributed_s
