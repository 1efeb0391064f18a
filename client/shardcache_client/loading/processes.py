"""Parts of a rank's work made by worker processes.

A DataLoader over the numbers of the parts sees to their order, their memory, and dead workers.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from shardcache_client.batches.maker import MadeBatch, Maker, Skips
from shardcache_client.batches.rank_chunks import Chunk
from shardcache_client.batches.rank_work import BatchForm, RankWork, Reading
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import for_epoch
from shardcache_client.loading.lock_probe import MAX_SAMPLES, LockProbe, LockUse
from shardcache_client.loading.parcel import Parcel
from shardcache_client.loading.tasks import Task
from shardcache_client.loading.worker_process import end_workers, hold_queues, prepare
from shardcache_client.reading.epochs.epoch_plans import PlacesReader

_MAX_WAITED_SHARE = 0.1
"""Maximum share of the time of making a part that may be waits for shards.

The lock samples of a part with longer waits do not count: a wait needs no lock, and would hide how
much the work itself needs it.
"""


class IssuedTask(NamedTuple):
    """A task as workers get it, along with each number of a part that they are to make.

    Attributes:
        serial: number of the iteration, as a later one may have the same task.
        task: the task itself.
        is_watched: True to see whether making its parts holds Python's global lock.
    """

    serial: int
    task: Task
    is_watched: bool


@dataclass(slots=True, eq=False)
class _OpenTask:
    """The task that a worker works on, and the resources that it holds for it.

    Attributes:
        resources: closes maker, places and probe, and gives back the session.
        next: the number after that of the last part.
    """

    issued: IssuedTask
    work: RankWork
    session: Session
    places: PlacesReader
    maker: Maker
    probe: LockProbe
    resources: ExitStack
    next: int = 0

    def part(self, number: int) -> MadePart:
        """Make a part. Raises the errors of reading and decoding."""
        self.next = number + 1
        self.probe.begin()
        raw = self.work.raw(number, self.places, self.session)
        made = self.maker.make(raw)
        lock_use = self.probe.end()
        if isinstance(made.batch, Chunk):
            made = made._replace(batch=Parcel.of(made.batch))
        times = made.times
        if times.waited_s > _MAX_WAITED_SHARE * times.lasted_s:
            lock_use = LockUse()  # no samples
        return MadePart(made, lock_use)


class MadePart(NamedTuple):
    """A part, and the use of Python's global lock while it was made."""

    made: MadeBatch
    lock_use: LockUse


class PartsByTask(Dataset[MadePart]):
    """The parts of a rank's work by task and number, each made by the worker that is asked for it.

    A worker reads on from its last part, so the numbers that it is asked for have to ascend.
    """

    def __init__(self, reading: Reading, form: BatchForm, loader: str) -> None:
        self._reading = reading
        self._form = form
        self._loader = loader  # its name
        self._open_task: _OpenTask | None = None  # of which this worker made its last part

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open_task": None}

    def __getitem__(self, issued_part: tuple[IssuedTask, int]) -> MadePart:
        issued, number = issued_part
        open_task = self._open_task
        if open_task is None or open_task.issued != issued or number < open_task.next:
            self.close()
            open_task = self._begin(issued)
            self._open_task = open_task
        try:
            part = open_task.part(number)
        except BaseException:
            self.close()
            raise
        # Parts are made by the workers in turn.
        next_number = number + self._workers()
        if next_number >= open_task.work.count or part.made.is_last:
            self.close()
        return part

    def _workers(self) -> int:
        """Return the number of worker processes, this one included."""
        info = get_worker_info()
        return 1 if info is None else int(info.num_workers)

    def _begin(self, issued: IssuedTask) -> _OpenTask:
        """Begin a task. Raises the errors of a session."""
        info = get_worker_info()
        prepare(self._reading.form.handover)
        topology = issued.task.rank
        if info is not None:
            topology = replace(topology, worker=info.id, workers=info.num_workers)
            Queue._on_queue_feeder_error = _put_error  # type: ignore[attr-defined]  # noqa: SLF001
        sessions = self._reading.sessions
        identity = ReaderIdentity(sessions.identity.job, topology, self._loader, self._form.places)
        reading = replace(self._reading, sessions=replace(sessions, identity=identity))
        work = issued.task.work(reading, self._form)
        with ExitStack() as resources:
            maker = resources.enter_context(work.open_maker(Skips(for_epoch(reading.on_error))))
            session = resources.enter_context(reading.sessions.borrow())
            is_shared = self._workers() > 1
            reader = work.place_reader(session, is_shared=is_shared)
            places = resources.enter_context(closing(reader))
            probe = LockProbe(MAX_SAMPLES if issued.is_watched else 0)
            resources.callback(probe.close)
            return _OpenTask(issued, work, session, places, maker, probe, resources.pop_all())
        raise AssertionError  # for type checkers: an ExitStack might suppress an exception

    def close(self) -> None:
        """Release the resources of the last task; the session is kept for the next one."""
        open_task = self._open_task
        self._open_task = None
        if open_task is not None:
            open_task.resources.close()


def _put_error(queue: Queue[Any], _error: Exception, lost: Any) -> None:
    """Put the current error in place of a part that cannot be pickled: the trainer waits for one.

    Overrides a hook of multiprocessing, as concurrent.futures does. A queue pickles in a thread of
    its own, which would print the error and go on without the part.
    """
    match lost:
        case (number, MadePart()):
            error = ExceptionWrapper(where="in a worker process")  # type: ignore[no-untyped-call]
            queue.put((number, error))
        case _:  # another queue's
            traceback.print_exc()


class _PartNumbers(Sampler[tuple[IssuedTask, int]]):
    """The numbers of a task's parts. Task and numbers are set before each iteration."""

    def __init__(self) -> None:
        self.issued: IssuedTask | None = None
        self.numbers = range(0)
        self.are_over = False

    def __iter__(self) -> Iterator[tuple[IssuedTask, int]]:
        assert self.issued is not None
        issued = self.issued
        for number in self.numbers:
            if self.are_over:
                return
            yield issued, number

    def __len__(self) -> int:
        return len(self.numbers)


class ProcessPool:
    """Worker processes that make the parts of a task; of several if the workers persist."""

    def __init__(
        self, reading: Reading, form: BatchForm, loader: str, options: dict[str, Any]
    ) -> None:
        self._part_numbers = _PartNumbers()
        self._serial = 0
        self._pid = os.getpid()
        dataset = PartsByTask(reading, form, loader)
        self.loader: DataLoader[MadePart] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self._part_numbers,
            collate_fn=_unchanged,
            **options,
        )

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that made this."""
        return self._pid == os.getpid()

    def made(self, task: Task, numbers: range, *, is_watched: bool = False) -> Generator[MadePart]:
        """Yield the parts of these numbers, in order, until `retire` is called.

        Args:
            is_watched: True to see whether making them holds Python's global lock.

        Raises what the workers raise, and torch's errors of their deaths.
        """
        self._serial += 1
        self._part_numbers.issued = IssuedTask(self._serial, task, is_watched)
        self._part_numbers.numbers = numbers
        parts = iter(self.loader)
        hold_queues(parts)
        are_intact = False  # True if another iteration may use the workers
        try:
            for part in parts:
                yield _unpacked(part)
            are_intact = True
        except GeneratorExit:
            are_intact = True
            raise
        finally:
            if not are_intact or self._part_numbers.are_over:
                end_workers(self.loader, parts)

    def retire(self) -> None:
        """Ask the workers for no further parts. They end once those asked for are taken."""
        self._part_numbers.are_over = True


def _unpacked(part: MadePart) -> MadePart:
    """Return a part with its chunk, which comes in a parcel; other parts as they are."""
    made = part.made
    if not isinstance(made.batch, Parcel):
        return part
    return part._replace(made=made._replace(batch=made.batch.value()))


def _unchanged(batch: Any) -> Any:
    """Replace torch's collating: a worker's part is complete."""
    return batch
