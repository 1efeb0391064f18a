"""Batches made by threads, in order and a limited number ahead of the user.

One thread reads raw batches, and other threads make batches of them. A raw batch is what was read
for one batch, usually its samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")  # a raw batch
B = TypeVar("B")  # the batch that is made of it

Check = Callable[[], None]
"""Called now and then during a wait, which it may end by raising an error."""


def nothing_to_check() -> None:
    """Do nothing: the `Check` of a wait that nothing interrupts."""


class AbandonedError(Exception):
    """The iterator over the batches has been closed or dropped, so reading ends."""


def made_by_threads(
    read: Callable[[Check], Generator[R]],
    make: Callable[[R], B],
    *,
    threads: int,
    ahead: int,
    begin: Callable[[], object] = lambda: None,
) -> Generator[B]:
    """Yield the batch that `make` returns for each raw batch, in the order of reading.

    The threads are started by the first `next`. They end with the iterator: at its end, with an
    error, or when it is closed or dropped.

    Args:
        read: returns the raw batches, over which a separate thread iterates. The check that it gets
            raises AbandonedError once the iterator is closed.
        make: makes a batch of a raw batch; called by `threads` threads.
        threads: number of threads that make batches.
        ahead: maximum number of raw batches that have been read, but not yielded as batches.
        begin: called first in each thread that makes batches.

    Raises the errors of `read` and `make`, at the point where the batch would have come.
    """
    queue = _BatchQueue(ahead)
    with ThreadPoolExecutor(
        threads,
        thread_name_prefix="shardcache-make",
        initializer=begin,
    ) as pool:
        # This is a daemon thread, since Python would wait for any other thread at the end of a
        # script that still has the iterator.
        reader = threading.Thread(
            target=_read,
            args=(queue, read, lambda raw: pool.submit(make, raw)),
            name="shardcache-read",
            daemon=True,
        )
        reader.start()
        try:
            future = queue.take()
            while future is not queue.end:
                yield future.result()
                future = queue.take()
            queue.end.result()  # raises the error of `read`, if there was one
        finally:
            queue.abandon()
            reader.join()
            pool.shutdown(cancel_futures=True)


class _BatchQueue:
    """The batches that are being made, in order; at most `ahead` of them.

    The thread that reads raw batches puts in the futures of the batches, and the thread that uses
    the batches takes these futures.

    Args:
        ahead: maximum number of batches that have been begun, but not taken.

    Attributes:
        end: the future that comes after the last batch. It has the error of reading if there was
            one.
    """

    def __init__(self, ahead: int) -> None:
        self.end = Future[None]()
        self._futures: SimpleQueue[Future[Any]] = SimpleQueue()
        self._free = threading.Semaphore(ahead)
        self._is_abandoned = False

    def take(self) -> Future[Any]:
        """Return the future of the next batch, once it has begun; return `end` after the last."""
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
        """Raise AbandonedError if the iterator over the batches has been closed or dropped."""
        if self._is_abandoned:
            raise AbandonedError

    def abandon(self) -> None:
        """Make the thread that reads end, even if it waits for the queue to have space."""
        self._is_abandoned = True
        self._free.release()


def _read(
    queue: _BatchQueue,
    read: Callable[[Check], Generator[R]],
    submit: Callable[[R], Future[Any]],
) -> None:
    """Read and submit each raw batch once the queue has space; put the queue's end after the last.

    Args:
        queue: the queue of batches.
        read: returns the raw batches; see `made_by_threads`.
        submit: starts to make the batch of a raw batch, and returns its future.
    """
    try:
        queue.wait_until_free()
        with closing(read(queue.check)) as raw_batches:
            for raw in raw_batches:
                queue.put(submit(raw))
                queue.wait_until_free()
    except BaseException as exn:  # noqa: BLE001 - it is raised where the batches are taken
        queue.end.set_exception(exn)
    else:
        queue.end.set_result(None)
    queue.put(queue.end)
