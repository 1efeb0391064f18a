"""Parts of a rank's work made by worker processes: a DataLoader over their numbers, for order, memory and deaths."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from shardcache_client.batches.maker import MadeBatch, Skips
from shardcache_client.batches.rank_chunks import Chunk
from shardcache_client.batches.rank_work import BatchForm, Maker, Places, RankWork, Reading
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.session import Session
from shardcache_client.handlers import for_epoch
from shardcache_client.loading.parcel import Parcel
from shardcache_client.loading.tasks import Task
from shardcache_client.loading.worker_process import end_workers, hold_queues, prepare


class Order(NamedTuple):
    """A task as workers get it with each number."""

    serial: int  # of the iteration, as a later one may have the same task
    task: Task


@dataclass(slots=True, eq=False)
class _Open:
    """The order that a worker works on, with all that it holds for it."""

    order: Order
    work: RankWork
    session: Session
    places: Places
    maker: Maker
    held: ExitStack
    next: int = 0  # the number after that of the last part


class PartsByOrder(Dataset[MadeBatch]):
    """The parts of a rank's work by order and number, each made by the worker that is asked for it.

    A worker reads on from the last number that it was asked for, so that numbers are to ascend.
    """

    def __init__(self, reading: Reading, form: BatchForm, loader: str) -> None:
        self._reading = reading
        self._form = form
        self._loader = loader  # its name
        self._open: _Open | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    def __getitem__(self, asked: tuple[Order, int]) -> MadeBatch:
        order, number = asked
        found = self._open
        if found is None or found.order != order or number < found.next:
            self.close()
            found = self._open = self._opened(order)
        found.next = number + 1
        try:
            made = found.maker.make(found.work.raw(number, found.places, found.session))
            if isinstance(made.batch, Chunk):
                made = made._replace(batch=Parcel.of(made.batch))
        except BaseException:
            self.close()
            raise
        workers = self._workers()
        if number + workers >= found.work.count or made.is_last:
            self.close()
        return made

    def _workers(self) -> int:
        info = get_worker_info()
        return 1 if info is None else int(info.num_workers)

    def _opened(self, order: Order) -> _Open:
        info = get_worker_info()
        prepare(self._reading.form.handover)
        topology = order.task.rank
        if info is not None:
            topology = replace(topology, worker=info.id, workers=info.num_workers)
        identity = ReaderIdentity(self._reading.identity.job, topology, self._loader, self._form.places)
        reading = replace(self._reading, identity=identity)
        work = order.task.work(reading, self._form)
        with ExitStack() as held:
            lone = held.enter_context(closing(work.lone_reader()))
            session = held.enter_context(reading.sessions.borrow(identity))
            places = held.enter_context(closing(work.place_reader(session, is_shared=self._workers() > 1)))
            maker = work.maker(Skips(for_epoch(reading.on_error)), lone)
            return _Open(order, work, session, places, maker, held.pop_all())
        raise AssertionError  # for type checkers: ExitStack may swallow exceptions, and this one has none to

    def close(self) -> None:
        """Release what is held for the last order; the session stays for the next."""
        found = self._open
        self._open = None
        if found is not None:
            found.held.close()


class _Numbers(Sampler[tuple[Order, int]]):
    """The numbers of an order's parts. Which order comes next is set before each iteration."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.numbers = range(0)

    def __iter__(self) -> Iterator[tuple[Order, int]]:
        assert self.order is not None
        order = self.order
        return ((order, number) for number in self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


class ProcessPool:
    """Worker processes that make the parts of one task, and of one after another if they persist."""

    def __init__(self, reading: Reading, form: BatchForm, loader: str, options: dict[str, Any]) -> None:
        self._numbers = _Numbers()
        self._serial = 0
        self._pid = os.getpid()
        dataset = PartsByOrder(reading, form, loader)
        self.loader: DataLoader[MadeBatch] = DataLoader(
            dataset, batch_size=None, sampler=self._numbers, collate_fn=_as_it_is, **options
        )

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that made this."""
        return self._pid == os.getpid()

    def made(self, task: Task, numbers: range) -> Generator[MadeBatch]:
        """Yield the parts of these numbers. Raises what the workers raise, and torch's errors of their deaths."""
        self._serial += 1
        self._numbers.order = Order(self._serial, task)
        self._numbers.numbers = numbers
        parts = iter(self.loader)
        hold_queues(parts)
        try:
            for made in parts:
                if isinstance(made.batch, Parcel):
                    made = made._replace(batch=made.batch.value())
                yield made
        except GeneratorExit:
            raise
        except BaseException:
            end_workers(self.loader, parts)
            raise


def _as_it_is(batch: Any) -> Any:
    return batch
