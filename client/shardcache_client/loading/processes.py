"""Parts of a rank's work made by worker processes.

A DataLoader over their numbers cares for order, memory and deaths.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
"""Share of a part's time beyond which a wait for shards spoils its samples.

A wait needs no lock.
"""


class IssuedTask(NamedTuple):
    """A task as it is issued to workers, with each number of a part that they are to make."""

    serial: int  # of the iteration, as a later one may have the same task
    task: Task
    is_watched: bool  # True to see whether making its parts holds Python's global lock


@dataclass(slots=True, eq=False)
class _Open:
    """The issued task that a worker works on, with all that it holds for it."""

    issued: IssuedTask
    work: RankWork
    session: Session
    places: PlacesReader
    maker: Maker
    probe: LockProbe
    held: ExitStack
    next: int = 0  # the number after that of the last part

    def part(self, number: int) -> MadePart:
        """Return a part. Raises the errors of reading and decoding."""
        self.next = number + 1
        self.probe.begin()
        raw = self.work.raw(number, self.places, self.session)
        made = self.maker.make(raw)
        lock_use = self.probe.end()
        if isinstance(made.batch, Chunk):
            made = made._replace(batch=Parcel.of(made.batch))
        times = made.times
        if times.waited_s > _MAX_WAITED_SHARE * (times.ended_s - times.begun_s):
            lock_use = LockUse()
        return MadePart(made, lock_use)


class MadePart(NamedTuple):
    """A part, and the use of Python's global lock by its making."""

    made: MadeBatch
    lock_use: LockUse


class PartsByTask(Dataset[MadePart]):
    """The parts of a rank's work by task and number, each made by the worker that is asked for it.

    A worker reads on from the last number that it was asked for, so that numbers are to ascend.
    """

    def __init__(self, reading: Reading, form: BatchForm, loader: str) -> None:
        self._reading = reading
        self._form = form
        self._loader = loader  # its name
        self._open: _Open | None = None  # of the task that this worker made its last part of

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def __getitem__(self, asked: tuple[IssuedTask, int]) -> MadePart:
        issued, number = asked
        found = self._open
        if found is None or found.issued != issued or number < found.next:
            self.close()
            found = self._open = self._opened(issued)
        try:
            part = found.part(number)
        except BaseException:
            self.close()
            raise
        workers = self._workers()
        if number + workers >= found.work.count or part.made.is_last:
            self.close()
        return part

    def _workers(self) -> int:
        """Return the number of workers among which this one is."""
        info = get_worker_info()
        return 1 if info is None else int(info.num_workers)

    def _opened(self, issued: IssuedTask) -> _Open:
        """Begin a task. Raises the errors of a session."""
        info = get_worker_info()
        prepare(self._reading.form.handover)
        topology = issued.task.rank
        if info is not None:
            topology = replace(topology, worker=info.id, workers=info.num_workers)
        shared = self._reading.sessions
        identity = ReaderIdentity(shared.identity.job, topology, self._loader, self._form.places)
        reading = replace(self._reading, sessions=replace(shared, identity=identity))
        work = issued.task.work(reading, self._form)
        with ExitStack() as held:
            maker = held.enter_context(work.open_maker(Skips(for_epoch(reading.on_error))))
            session = held.enter_context(reading.sessions.borrow())
            is_shared = self._workers() > 1
            reader = work.place_reader(session, is_shared=is_shared)
            places = held.enter_context(closing(reader))
            probe = LockProbe(MAX_SAMPLES if issued.is_watched else 0)
            held.callback(probe.close)
            return _Open(issued, work, session, places, maker, probe, held.pop_all())
        raise AssertionError  # never reached; type checkers know that an ExitStack may swallow one

    def close(self) -> None:
        """Release what is held for the last task; the session stays for the next."""
        found = self._open
        self._open = None
        if found is not None:
            found.held.close()


class _Numbers(Sampler[tuple[IssuedTask, int]]):
    """The numbers of a task's parts. The task is set before each iteration."""

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
    """Worker processes that make the parts of one task.

    If they persist, they make those of one task after another.
    """

    def __init__(
        self, reading: Reading, form: BatchForm, loader: str, options: dict[str, Any]
    ) -> None:
        self._numbers = _Numbers()
        self._serial = 0
        self._pid = os.getpid()
        dataset = PartsByTask(reading, form, loader)
        self.loader: DataLoader[MadePart] = DataLoader(
            dataset, batch_size=None, sampler=self._numbers, collate_fn=_as_it_is, **options
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
        self._numbers.issued = IssuedTask(self._serial, task, is_watched)
        self._numbers.numbers = numbers
        parts = iter(self.loader)
        hold_queues(parts)
        are_intact = False  # the workers, which another iteration may use
        try:
            for part in parts:
                yield _unpacked(part)
            are_intact = True
        except GeneratorExit:
            are_intact = True
            raise
        finally:
            if not are_intact or self._numbers.are_over:
                end_workers(self.loader, parts)

    def retire(self) -> None:
        """Have the workers make only what they were asked for.

        They end once that is taken.
        """
        self._numbers.are_over = True


def _unpacked(part: MadePart) -> MadePart:
    """Return a part with its chunk, if that came in a parcel."""
    made = part.made
    if not isinstance(made.batch, Parcel):
        return part
    return part._replace(made=made._replace(batch=made.batch.value()))


def _as_it_is(batch: Any) -> Any:
    """Stand in for torch's collating: a worker's part is complete."""
    return batch
