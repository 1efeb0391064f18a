"""Key presses while a command is displaying output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

_MOST_BYTES = 64


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
        typed = os.read(fd, _MOST_BYTES)
        if not typed or key in typed.decode(errors="replace"):
            action()

    tty.setcbreak(fd)
    loop.add_reader(fd, pressed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, former)
