"""Work that blocks, in threads that nothing waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, which is not joined at exit: a disk or daemon that hangs must not block a command.

    If the caller is cancelled, the thread is abandoned.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that it accepts a result even after its waiter was cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exn:  # noqa: BLE001  # raised where the result is awaited
            future.set_exception(exn)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
