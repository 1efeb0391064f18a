"""All connected readers, their jobs, and the most recent jobs without readers.

A reader is one session of a training process, or of another program that reads by a plan. The
readers that give the same job name and belong to the same user are one job. Each worker process of
a DataLoader is a reader of its own, and the workers of one DataLoader are called mates. The bill of
a job is the number of bytes and requests that were fetched and read for the job, with their cost.
"""

from collections.abc import Iterator

from shardcache.cache.readers.connected_reader import Reader
from shardcache.cache.readers.jobs import Job, Loader
from shardcache.cache.readers.plan_memory import PlanMemory
from shardcache.cache.readers.services import ReaderServices
from shardcache.cache.waiting.waits import JobKey
from shardcache.shared.exceptions import ProtocolError
from shardcache.shared.protocol import MAX_JOB_CHARS

# Number of jobs without readers that are still shown, as readers may disconnect between epochs.
_PAST_JOBS = 32


class Readers:
    """All connected readers, their jobs, and the most recent jobs without readers.

    Args:
        services: services that all readers use.
        plan_memory_bytes: limit of the memory that the plans of all readers take together.
    """

    def __init__(
        self,
        services: ReaderServices,
        plan_memory_bytes: int,
    ) -> None:
        self._services = services
        self._planner = services.planner
        self._changed = services.changed
        self._bills = services.counters.bills
        self._readers: set[Reader] = set()
        # By job and loader, the readers that are workers of this loader.
        self._mates: dict[tuple[JobKey, Loader], set[Reader]] = {}
        self._jobs: dict[JobKey, Job] = {}  # most recently joined last
        self._plan_memory = PlanMemory(plan_memory_bytes)

    def __iter__(self) -> Iterator[Reader]:
        return iter(list(self._readers))

    def jobs(self) -> list[Job]:
        """Return the jobs, most recently joined last."""
        return list(self._jobs.values())

    def add(self, job_name: str, uid: int, loader: Loader | None = None) -> Reader:
        """Add a reader to a user's job and return it.

        Raises ProtocolError if the job's name is too long to show.

        Args:
            job_name: name of the job.
            uid: id of the user.
            loader: the loader that the reader is a worker of; None for a reader that is no worker.
        """
        if len(job_name) > MAX_JOB_CHARS:
            raise ProtocolError(
                f"the job name has {len(job_name)} characters; the limit is {MAX_JOB_CHARS}",
            )
        job = self._join(job_name, uid)
        self._forget_past_jobs()
        mates: set[Reader] = set()
        if loader is not None:
            mates = self._mates.setdefault((job.key, loader), set())
        reader = Reader(
            job,
            self._services,
            self._plan_memory,
            disconnected=self._remove,
            loader=loader,
            mates=mates,
        )
        mates.add(reader)  # the mates share this set, so all of them see the new reader
        self._readers.add(reader)
        return reader

    def _join(self, job_name: str, uid: int) -> Job:
        """Count a further reader of a job, and return the job, which may be new.

        The job moves to the end of `_jobs`, as the most recently joined job.
        """
        job = self._jobs.pop((job_name, uid), None)
        if job is None:
            job = Job(job_name, uid)
        self._jobs[job.key] = job
        job.sessions += 1
        return job

    def _forget_past_jobs(self) -> None:
        """Forget the jobs without readers, and their bills, except the most recent ones."""
        past = [key for key, job in self._jobs.items() if not job.sessions]
        surplus = max(0, len(past) - _PAST_JOBS)
        for key in past[:surplus]:
            del self._jobs[key]
            self._bills.forget(key)

    def _remove(self, reader: Reader) -> None:
        """Forget a reader and its plan."""
        self._readers.discard(reader)
        reader.job.sessions -= 1
        if reader.loader is not None:
            mates = self._mates[reader.job.key, reader.loader]
            mates.discard(reader)
            if not mates:
                del self._mates[reader.job.key, reader.loader]
        self._planner.schedule.forget(reader)
        self._changed.notify()
