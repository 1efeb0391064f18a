"""Per-job progress and waiting times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardcache.cache.waits import JobKey, Stage, Wait
from shardcache.errors import ProtocolError
from shardcache.metrics import Histogram
from shardcache.units import user_name

# Number of disconnected jobs still shown: readers disconnect between epochs.
_PAST_JOBS = 32

# A longer name would crowd everything else off the status page.
_MAX_NAME_CHARS = 255

_CAUSES = {Stage.ASKING: "network_s", Stage.NETWORK: "network_s", Stage.SPACE: "space_s", Stage.DISK: "disk_s"}


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader, which takes batches of `batch_size` samples from its workers in turn.

    Attributes:
        name: unique among the loaders of its rank's process.
    """

    name: str
    rank: int
    batch_size: int


@dataclass(slots=True, eq=False)
class Job:
    """All readers of one job of one user.

    Attributes:
        sessions: number of connected readers.
        shards_planned: shards in the epochs that its readers have begun.
        shards_done: shards read and released.
        waited_s: total time that readers had nothing to read, summed over all readers.
        waited_by_cause_s: `waited_s` broken down by cause.
    """

    name: str
    uid: int
    sessions: int = 0
    shards_planned: int = 0
    shards_done: int = 0
    waited_s: float = 0.0
    waited_by_cause_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CAUSES.values(), 0.0))

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
            "waited_s": round(self.waited_s, 3),
            "waited": {cause: round(spent_s, 3) for cause, spent_s in self.waited_by_cause_s.items()},
        }


@dataclass(slots=True)
class WaitClock:
    """Stopwatch that runs while one reader has nothing to read.

    Attributes:
        measured: receives the duration of each wait that ends.
        waits: the reader's current waits, longest first; empty while it reads.
        waited_s: total time spent waiting.
    """

    job: Job
    measured: Histogram
    waits: list[Wait] = field(default_factory=list)
    waited_s: float = 0.0
    _charged_until_s: float = 0.0

    def start(self, wait: Wait) -> None:
        """Start the clock: from now on the reader waits."""
        self.charge()
        wait.since_s = self._charged_until_s
        self.waits.append(wait)

    def stop(self, wait: Wait) -> None:
        """End a wait; the clock stops when none is left. No-op if the wait was never started."""
        if wait in self.waits:
            self.charge()
            self.waits.remove(wait)
            assert wait.since_s is not None  # set by `start`
            self.measured.observe(time.monotonic() - wait.since_s)

    def charge(self) -> None:
        """Charge the time since the last call to the stages of the transfer being waited for."""
        since_s, now_s = self._charged_until_s, time.monotonic()
        self._charged_until_s = now_s
        if not self.waits:
            return
        self.waited_s += now_s - since_s
        self.job.waited_s += now_s - since_s
        stages, known_s = self.waits[0].stages, 0.0
        for stage, spent_s in stages.spent_s(since_s, now_s).items() if stages else ():
            self.job.waited_by_cause_s[_CAUSES[stage]] += spent_s
            known_s += spent_s
        self.job.waited_by_cause_s[_CAUSES[Stage.ASKING]] += now_s - since_s - known_s


class Jobs:
    """Jobs with connected readers, and the most recent of those without."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, Job] = {}

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs, most recently joined last."""
        return iter(list(self._jobs.values()))

    def join(self, name: str, uid: int) -> Job:
        """Add a reader to a user's job and return the job. Raises ProtocolError if its name is too long to show."""
        if len(name) > _MAX_NAME_CHARS:
            raise ProtocolError(f"the job name has {len(name)} characters; the limit is {_MAX_NAME_CHARS}")
        key = (name, uid)
        job = self._jobs.pop(key, None) or Job(name, uid)
        self._jobs[key] = job
        job.sessions += 1
        past = [key for key, job in self._jobs.items() if not job.sessions]
        for key in past[: max(0, len(past) - _PAST_JOBS)]:
            del self._jobs[key]
        return job
