"""An event loop in a thread of this process, for code that blocks, and safe beside forks.

A child has only the thread that forked it, and every lock as it was at that moment. A lock of a C library that another
thread held is held in the child until it ends: OpenSSL's, for one, which each thread takes at its first use and once
more at its end, after `Thread.join` has returned. So there is one loop for a process, its threads last as long as the
process does, and they rest while it forks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A fork waits no longer for a thread that works: for a name to be resolved, say.
_REST_LIMIT_S = 5.0


class _Pool(ThreadPoolExecutor):
    """The loop's threads for whatever blocks, and what they are busy with."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="shardcache-direct")
        self.unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `ThreadPoolExecutor.submit`."""
        future = super().submit(fn, *args, **kwargs)
        self.unfinished.add(future)
        future.add_done_callback(self.unfinished.discard)
        return future


class LoopThread:
    """The loop of this process. A forked child gets another: `loop_here` returns it.

    Attributes:
        loop: the event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pool = _Pool()
        self.loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self.loop.run_forever, name="shardcache-direct", daemon=True)
        self._forked = threading.Event()
        weakref.finalize(self, _stop, self.loop, self._thread, os.getpid())
        self._thread.start()

    def __repr__(self) -> str:
        return f"LoopThread({self.loop!r})"

    def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Begin to run a coroutine function on the loop."""
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self.loop)

    def is_current(self) -> bool:
        """Return whether the caller runs on the loop."""
        return threading.current_thread() is self._thread

    def rest(self) -> None:
        """Let no thread of the loop do anything from now on until `go_on`."""
        self._forked = forked = threading.Event()
        if self.loop.is_closed() or self.is_current():
            return
        resting = threading.Event()

        def pause() -> None:
            resting.set()
            forked.wait()

        self.loop.call_soon_threadsafe(pause)
        if resting.wait(_REST_LIMIT_S):  # it gives the pool nothing more to do
            wait(list(self._pool.unfinished), _REST_LIMIT_S)

    def go_on(self) -> None:
        """End the rest."""
        self._forked.set()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """End the thread when the process ends. A child has none, and the loop's selector is its parent's, too."""
    if os.getpid() == pid:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_REST_LIMIT_S)
        if not thread.is_alive():
            loop.close()


_present: LoopThread | None = None
_inherited: list[LoopThread] = []
_changing = threading.Lock()  # held by who makes the loop, and by who forks


def loop_here() -> LoopThread:
    """Return the loop of this process; the first call makes it."""
    global _present
    with _changing:
        if _present is None:
            _present = LoopThread()
        return _present


def _prepare_fork() -> None:
    _changing.acquire()
    if _present is not None:
        _present.rest()


def _end_fork() -> None:
    if _present is not None:
        _present.go_on()
    _changing.release()


def _begin_child() -> None:
    global _present, _changing
    _changing = threading.Lock()
    if _present is not None:
        _inherited.append(_present)  # never collected: to close its selector would change the parent's
        _present = None


os.register_at_fork(before=_prepare_fork, after_in_parent=_end_fork, after_in_child=_begin_child)
