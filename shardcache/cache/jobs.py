"""What is told of a training job: how far it is, how fast, and what it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardcache.cache.waiting import Stage, Wait
from shardcache.errors import ProtocolError

if TYPE_CHECKING:
    from shardcache.cache.readers import Reader

# Jobs without a connection are shown until so many newer ones have come: epochs end and begin.
_PAST_JOBS = 32

# Longer ones would make a status page of what one user wrote.
_LONGEST_NAME = 255

_CAUSES = {Stage.ASKING: "network_s", Stage.NETWORK: "network_s", Stage.SPACE: "space_s", Stage.DISK: "disk_s"}


@dataclass(frozen=True, slots=True)
class Loader:
    """A data loader, which takes batches of `batch_size` samples from its workers in turn.

    Attributes:
        name: tells it from the other loaders of its rank's process.
    """

    name: str
    rank: int
    batch_size: int


@dataclass(slots=True, eq=False)
class Job:
    """All readers of one job of one user.

    Attributes:
        sessions: readers connected now.
        workers: those of them that are a loader's.
        shards_planned: shards of the epochs that its readers have begun.
        shards_done: shards read and given back.
        stall_s: seconds in which a reader had nothing to read, all readers together.
        waited_s: the same by what was waited for.
    """

    name: str
    uid: int
    sessions: int = 0
    workers: dict[Loader, set[Reader]] = field(default_factory=dict, repr=False)
    shards_planned: int = 0
    shards_done: int = 0
    stall_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_CAUSES.values(), 0.0))

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from every other job."""
        return self.name, self.uid

    def leave(self, reader: Reader) -> None:
        """Count a reader no longer."""
        self.sessions -= 1
        if reader.loader is not None:
            self.workers[reader.loader].discard(reader)
            if not self.workers[reader.loader]:
                del self.workers[reader.loader]

    def to_json(self) -> dict[str, Any]:
        """Return what `shardcache status` shows of it."""
        return {
            "name": self.name,
            "uid": self.uid,
            "sessions": self.sessions,
            "shards_planned": self.shards_planned,
            "shards_done": self.shards_done,
            "stall_s": round(self.stall_s, 3),
            "waited": {cause: round(spent_s, 3) for cause, spent_s in self.waited_s.items()},
        }


@dataclass(slots=True)
class StallClock:
    """Runs while one reader has nothing to read.

    Attributes:
        over: told of each wait that ends.
        waits: what it waits with, the longest first; none while it reads.
        stalled_s: how long it has stood still altogether.
    """

    job: Job
    over: Callable[[Wait, Job], None]
    waits: list[Wait] = field(default_factory=list)
    stalled_s: float = 0.0
    _charged_until_s: float = 0.0

    def start(self, wait: Wait) -> None:
        """Let it run: from now on the reader has nothing to do but this wait."""
        self.charge()
        wait.since_s = self._charged_until_s
        self.waits.append(wait)

    def stop(self, wait: Wait) -> None:
        """Stop it, if it runs for this wait and no other."""
        if wait in self.waits:
            self.charge()
            self.waits.remove(wait)
            self.over(wait, self.job)

    def charge(self) -> None:
        """Charge what it has run since the last time to what is waited for."""
        since_s, now_s = self._charged_until_s, time.monotonic()
        self._charged_until_s = now_s
        if not self.waits:
            return
        self.stalled_s += now_s - since_s
        self.job.stall_s += now_s - since_s
        stages, known_s = self.waits[0].stages, 0.0
        for stage, spent_s in stages.spent_s(since_s, now_s).items() if stages else ():
            self.job.waited_s[_CAUSES[stage]] += spent_s
            known_s += spent_s
        self.job.waited_s[_CAUSES[Stage.ASKING]] += now_s - since_s - known_s


class Jobs:
    """The jobs that have readers, and some that had."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, int], Job] = {}

    def __iter__(self) -> Iterator[Job]:
        """Yield them, the one that was joined last at the end."""
        return iter(list(self._jobs.values()))

    def join(self, name: str, uid: int) -> Job:
        """Return a user's job, with one reader more. Raises ProtocolError where its name is too long to be shown."""
        if len(name) > _LONGEST_NAME:
            raise ProtocolError(f"a job's name has at most {_LONGEST_NAME} characters, this one {len(name)}")
        key = (name, uid)
        job = self._jobs.pop(key, None) or Job(name, uid)
        self._jobs[key] = job
        job.sessions += 1
        past = [key for key, job in self._jobs.items() if not job.sessions]
        for key in past[: max(0, len(past) - _PAST_JOBS)]:
            del self._jobs[key]
        return job
