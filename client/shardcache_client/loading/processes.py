"""Parts of a rank's work made by worker processes.

- A part is one batch, or one chunk of samples for a stage.
- A task says what a rank has to make in an iteration; its parts are numbered.
- The trainer is the process that runs the training loop.

A torch DataLoader, whose samples are the numbers of the parts, starts the processes, keeps the
parts in order, passes their memory to the trainer, and reports dead workers. Until a loader has
chosen between threads and processes, a probe samples how much the work holds Python's global lock;
see `worker_choice`.
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

from shardcache_client.batches.maker import MadePart, Maker, Skips
from shardcache_client.batches.rank_chunks import Chunk
from shardcache_client.batches.rank_work import BatchForm, RankWork, Reading
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import for_epoch
from shardcache_client.loading.lock_probe import MAX_SAMPLES, LockProbe, LockUse
from shardcache_client.loading.parcel import Parcel
from shardcache_client.loading.tasks import Task
from shardcache_client.loading.worker_process import end_workers, keep_queues_open, prepare_process
from shardcache_client.reading.epochs.epoch_plans import PlacesReader

_MAX_WAITED_SHARE = 0.1
"""Maximum share of waits for shards in the time of making a part, for its lock samples to count.

A wait needs no lock, and would hide how much the work itself needs the lock.
"""


class IssuedTask(NamedTuple):
    """A task as it is sent to workers: once for each part, along with the part's number.

    Attributes:
        serial: number of the iteration. It distinguishes iterations whose tasks are equal.
        task: the task.
        is_watched: True to sample whether making the task's parts holds Python's global lock.
    """

    serial: int
    task: Task
    is_watched: bool


@dataclass(slots=True, eq=False)
class _OpenTask:
    """The task that a worker works on, and the resources that the worker holds for the task.

    Attributes:
        issued: the task as it was sent.
        work: reads the samples of each part.
        session: the session with the daemon.
        places_reader: reads the samples at places, for `work`.
        maker: makes parts of the samples that were read.
        probe: samples the use of Python's global lock.
        resources: closes maker, places reader and probe, and gives back the session.
        next: number of the part that is made next, if no part is left out.
    """

    issued: IssuedTask
    work: RankWork
    session: Session
    places_reader: PlacesReader
    maker: Maker
    probe: LockProbe
    resources: ExitStack
    next: int = 0

    def make_part(self, number: int) -> SentPart:
        """Read and make a part. Raises the errors of reading and decoding."""
        self.next = number + 1
        self.probe.begin()
        raw = self.work.read_part(number, self.places_reader, self.session)
        part = self.maker.make(raw)
        lock_use = self.probe.end()
        if isinstance(part.content, Chunk):
            part = part._replace(content=Parcel.of(part.content))
        times = part.times
        if times.waited_s > _MAX_WAITED_SHARE * times.lasted_s:
            lock_use = LockUse()  # leaves out the samples that were taken
        return SentPart(part, lock_use)


class SentPart(NamedTuple):
    """A part as a worker process sends it.

    Attributes:
        part: the part; a chunk is packed into a `Parcel`.
        lock_use: samples of Python's global lock while the part was made; none if not watched.
    """

    part: MadePart
    lock_use: LockUse


class PartsByTask(Dataset[SentPart]):
    """The parts of a rank's work by task and number, each made by the worker that is asked for it.

    A worker reads on from its last part, so the numbers that a worker is asked for have to ascend.

    Args:
        reading: has what is needed to read the dataset.
        form: the form of the batches.
        loader_name: name of the loader, under which the daemon groups the workers.
    """

    def __init__(self, reading: Reading, form: BatchForm, loader_name: str) -> None:
        self._reading = reading
        self._form = form
        self._loader_name = loader_name
        self._open_task: _OpenTask | None = None  # the task of the part that was made last

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open_task": None}

    def __getitem__(self, issued_part: tuple[IssuedTask, int]) -> SentPart:
        issued, number = issued_part
        open_task = self._open_task
        # The reader of an open task cannot go back to a part before its next one.
        if open_task is None or open_task.issued != issued or number < open_task.next:
            self.close()
            open_task = self._begin(issued)
            self._open_task = open_task
        try:
            sent = open_task.make_part(number)
        except BaseException:
            self.close()
            raise
        # The workers make parts in turn, so this worker's next part is as many numbers further as
        # there are workers. If there is none, the task is closed now, to free its shards.
        next_number = number + self._worker_count()
        if next_number >= open_task.work.count or sent.part.is_last:
            self.close()
        return sent

    def _worker_count(self) -> int:
        """Return the number of worker processes, this one included."""
        info = get_worker_info()
        return 1 if info is None else int(info.num_workers)

    def _begin(self, issued: IssuedTask) -> _OpenTask:
        """Begin a task. Raises the errors of a session."""
        prepare_process(self._reading.form.handover)
        topology = issued.task.rank
        info = get_worker_info()
        if info is not None:
            topology = replace(topology, worker=info.id, workers=info.num_workers)
            # If the worker's queue cannot pickle a part, it sends the error to the trainer.
            Queue._on_queue_feeder_error = _put_error  # type: ignore[attr-defined]  # noqa: SLF001
        sessions = self._reading.sessions
        identity = ReaderIdentity(
            sessions.identity.job, topology, self._loader_name, self._form.places_per_batch
        )
        reading = replace(self._reading, sessions=replace(sessions, identity=identity))
        work = issued.task.work(reading, self._form)
        skips = Skips(for_epoch(reading.on_error))  # passes errors to the user's handler
        with ExitStack() as resources:
            maker = resources.enter_context(work.open_maker(skips))
            session = resources.enter_context(reading.sessions.borrow())
            is_shared = self._worker_count() > 1
            places_reader = work.open_places_reader(session, is_shared=is_shared)
            resources.enter_context(closing(places_reader))
            probe = LockProbe(MAX_SAMPLES if issued.is_watched else 0)
            resources.callback(probe.close)
            return _OpenTask(
                issued,
                work,
                session=session,
                places_reader=places_reader,
                maker=maker,
                probe=probe,
                resources=resources.pop_all(),  # from here on, the open task closes them
            )
        raise AssertionError  # for type checkers: an ExitStack might suppress an exception

    def close(self) -> None:
        """Release the resources of the open task, whose session the next task can borrow."""
        open_task = self._open_task
        self._open_task = None
        if open_task is not None:
            open_task.resources.close()


def _put_error(queue: Queue[Any], _error: Exception, lost: Any) -> None:
    """Send the current error in place of a part that cannot be pickled.

    The trainer would otherwise wait for the part. A queue pickles in a separate thread, which by
    default prints an error and goes on without the part. This overrides a hook of multiprocessing,
    as concurrent.futures does.

    Args:
        lost: the message that could not be pickled.
    """
    match lost:
        case (number, SentPart()):
            error = ExceptionWrapper(where="in a worker process")  # type: ignore[no-untyped-call]
            queue.put((number, error))
        case _:  # a message of another queue: print the error, as the hook does by default
            traceback.print_exc()


class _PartNumbers(Sampler[tuple[IssuedTask, int]]):
    """Sampler of the numbers of a task's parts.

    Attributes:
        issued: the task; set before each iteration.
        numbers: numbers of the parts; set before each iteration.
        is_retired: True to ask the workers for no further parts.
    """

    def __init__(self) -> None:
        self.issued: IssuedTask | None = None
        self.numbers = range(0)
        self.is_retired = False

    def __iter__(self) -> Iterator[tuple[IssuedTask, int]]:
        assert self.issued is not None
        issued = self.issued
        for number in self.numbers:
            if self.is_retired:
                return
            yield issued, number

    def __len__(self) -> int:
        return len(self.numbers)


class ProcessPool:
    """Worker processes that make the parts of a task, or of several tasks if the workers persist.

    Args:
        reading: has what is needed to read the dataset.
        form: the form of the batches.
        loader_name: name of the loader, under which the daemon groups the workers.
        options: options of the DataLoader that starts the processes.
    """

    def __init__(
        self, reading: Reading, form: BatchForm, loader_name: str, options: dict[str, Any]
    ) -> None:
        self._part_numbers = _PartNumbers()
        self._serial = 0
        self._pid = os.getpid()
        self._dataloader: DataLoader[SentPart] = DataLoader(
            PartsByTask(reading, form, loader_name),
            batch_size=None,
            sampler=self._part_numbers,
            collate_fn=_unchanged,
            **options,
        )

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the process that made this pool."""
        return self._pid == os.getpid()

    def parts(self, task: Task, numbers: range, *, is_watched: bool = False) -> Generator[SentPart]:
        """Yield the parts of these numbers, in order, until `retire` is called.

        Args:
            task: the task that has the parts.
            numbers: numbers of the parts to make.
            is_watched: True to sample whether making the parts holds Python's global lock.

        Raises any error of the workers, and torch's errors about dead workers.
        """
        self._serial += 1
        self._part_numbers.issued = IssuedTask(self._serial, task, is_watched)
        self._part_numbers.numbers = numbers
        sent_parts = iter(self._dataloader)
        keep_queues_open(sent_parts)
        may_reuse_workers = False
        try:
            for sent in sent_parts:
                yield _unpacked(sent)
            may_reuse_workers = True
        except GeneratorExit:
            may_reuse_workers = True
            raise
        finally:
            # After an error, or when no parts are wanted any more, the workers end. Otherwise they
            # stay for the next task, if they persist.
            if not may_reuse_workers or self._part_numbers.is_retired:
                end_workers(self._dataloader, sent_parts)

    def retire(self) -> None:
        """Ask the workers for no further parts.

        The workers end once the caller has taken the parts that they were already asked for.
        """
        self._part_numbers.is_retired = True


def _unpacked(sent: SentPart) -> SentPart:
    """Return a part with its chunk unpacked from its parcel; return other parts as they are."""
    part = sent.part
    if not isinstance(part.content, Parcel):
        return sent
    return sent._replace(part=part._replace(content=part.content.value()))


def _unchanged(sent: Any) -> Any:
    """Return a part as it is; replaces torch's collating, as a worker's part is complete."""
    return sent
