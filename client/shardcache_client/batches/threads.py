"""Batches made by threads, in order and a limited number ahead.

One thread reads what they are made of, others make them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")  # an item that is read
B = TypeVar("B")  # the batch that is made of it


class AbandonedError(Exception):
    """Nobody wants the batches any more."""


def made_by_threads(
    read: Callable[[Callable[[], None]], Generator[R]],
    make: Callable[[R], B],
    *,
    threads: int,
    ahead: int,
    begin: Callable[[], object] = lambda: None,
) -> Generator[B]:
    """Yield what `make` returns for each item that is read, in their order.

    The threads are started by the first `next`, and end with the iterator: at its end, with an
    error, or when it is closed or dropped.

    Args:
        read: returns the items, which a thread of its own iterates over. It gets a function that
            raises AbandonedError once nobody wants them, to be called now and then in a long wait.
        make: is called by `threads` threads.
        ahead: maximum number of items that have been read, but not yielded.
        begin: is called by each of these threads first.

    Raises what `read` and `make` raise, where their item would have come.
    """
    queue = _BatchQueue(ahead)
    with ThreadPoolExecutor(
        threads,
        thread_name_prefix="shardcache-make",
        initializer=begin,
    ) as pool:
        # A daemon thread: at the end of a script that still has the iterator, Python would wait
        # for any other.
        reader = threading.Thread(
            target=_read,
            args=(queue, read, partial(_submit, pool, make)),
            name="shardcache-read",
            daemon=True,
        )
        reader.start()
        try:
            future = queue.take()
            while future is not queue.end:
                yield future.result()
                future = queue.take()
            queue.end.result()  # raises what `read` has raised
        finally:
            queue.abandon()
            reader.join()
            pool.shutdown(cancel_futures=True)


class _BatchQueue:
    """The batches that are being made, in order.

    They are between the thread that reads and the one that takes them.

    Args:
        ahead: maximum number of batches that have been begun, but not taken.

    Attributes:
        end: comes after the last batch, with the error of reading, if there is one.
    """

    def __init__(self, ahead: int) -> None:
        self.end = Future[None]()
        self._futures: SimpleQueue[Future[Any]] = SimpleQueue()
        self._free = threading.Semaphore(ahead)
        self._abandoned = False

    def take(self) -> Future[Any]:
        """Wait for the next batch that is being made, and return it; `end` after the last."""
        future = self._futures.get()
        self._free.release()
        return future

    def put(self, future: Future[Any]) -> None:
        """Append a batch that is being made, or the end."""
        self._futures.put(future)

    def wait_until_free(self) -> None:
        """Wait until another batch may be begun. Raises AbandonedError."""
        self._free.acquire()
        self.check()

    def check(self) -> None:
        """Raise AbandonedError if nobody takes the batches any more."""
        if self._abandoned:
            raise AbandonedError

    def abandon(self) -> None:
        """Have the thread that reads end."""
        self._abandoned = True
        self._free.release()


def _read(
    queue: _BatchQueue,
    read: Callable[[Callable[[], None]], Generator[R]],
    submit: Callable[[R], Future[Any]],
) -> None:
    """Submit each item that is read once the queue has space, and then put the queue's end."""
    try:
        queue.wait_until_free()
        with closing(read(queue.check)) as items:
            for item in items:
                queue.put(submit(item))
                queue.wait_until_free()
    except BaseException as exn:  # noqa: BLE001 - it is raised where the batches are taken
        queue.end.set_exception(exn)
    else:
        queue.end.set_result(None)
    queue.put(queue.end)


def _submit(pool: ThreadPoolExecutor, make: Callable[[R], B], item: R) -> Future[B]:
    return pool.submit(make, item)
