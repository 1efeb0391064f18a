"""Event loop in a thread of this process, for use from blocking code, and safe to fork.

A child has only the thread that forked it, and every lock in its state at that moment. A C library's lock that another
thread held stays locked in the child for good: OpenSSL's, for one, which each thread takes at its first use and again
at its end, after `Thread.join` has returned. So there is one loop per process, its threads live as long as the process,
and they pause while it forks.
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

# Longest wait of a fork for a busy thread, such as one that resolves a name.
_REST_LIMIT_S = 5.0


class _Pool(ThreadPoolExecutor):
    """The loop's threads for blocking calls, and their unfinished work."""

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
    """The event loop of this process and its thread. A forked child gets another from `loop_here`.

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
        """Start a coroutine function on the loop."""
        return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self.loop)

    def is_current(self) -> bool:
        """Return whether the caller runs on the loop's thread."""
        return threading.current_thread() is self._thread

    def rest(self) -> None:
        """Pause all threads of the loop until `go_on`."""
        self._forked = forked = threading.Event()
        if self.loop.is_closed() or self.is_current():
            return
        resting = threading.Event()

        def pause() -> None:
            resting.set()
            forked.wait()

        self.loop.call_soon_threadsafe(pause)
        if resting.wait(_REST_LIMIT_S):  # the loop submits no more work to the pool
            wait(list(self._pool.unfinished), _REST_LIMIT_S)

    def go_on(self) -> None:
        """Continue after `rest`."""
        self._forked.set()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    """Stop the thread when the process ends. A child has no such thread, and shares the selector with its parent."""
    if os.getpid() == pid:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_REST_LIMIT_S)
        if not thread.is_alive():
            loop.close()


_present: LoopThread | None = None
_inherited: list[LoopThread] = []
_changing = threading.Lock()  # held while the loop is made, and during a fork


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
        _inherited.append(_present)  # never collected: closing its selector would change the parent's
        _present = None


os.register_at_fork(before=_prepare_fork, after_in_parent=_end_fork, after_in_child=_begin_child)
