"""Work that blocks in threads that nothing waits for, and key presses, for commands with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_MAX_BYTES = 64


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


@contextlib.contextmanager
def on_key(key: str, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` when `key` is pressed or the terminal hangs up; do nothing if stdin is not a terminal.

    Ctrl-C works as usual. Needs a running event loop.
    """
    if not sys.stdin.isatty():
        yield
        return
    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    former = termios.tcgetattr(fd)

    def pressed() -> None:
        typed = os.read(fd, _MAX_BYTES)
        if not typed or key in typed.decode(errors="replace"):
            action()

    tty.setcbreak(fd)
    loop.add_reader(fd, pressed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, former)
