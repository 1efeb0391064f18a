"""The part of a helper process's program that reads requests, answers pings and sends answers.

A helper process reads one JSON value per line from standard input, and writes one answer per line
to standard output. An empty line is a ping, which is answered with an empty line even while a
request is being worked on. `HelperProcess` is the other side, in the daemon.
"""

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

_PR_SET_PDEATHSIG = 1
_STDIN = 0
_STDOUT = 1
_READ_BYTES = 64 * 1024
_write_lock = threading.Lock()  # keeps the lines of the two threads from being mixed


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent dies (prctl(2)).

    The next daemon may index the same shard, and this process must not write to the same file then.

    Args:
        parent: the parent's pid.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an answer without a reader is not an error
    if os.getppid() != parent:  # the parent died before the call of prctl
        sys.exit()


def requests() -> Iterator[Any]:
    """Yield the JSON values that arrive, one per line, until the input ends.

    Another thread answers pings, even while the caller works on a request. An empty line is sent at
    the start: it tells the daemon that the process has started, so that silence from then on means
    that the process hangs.
    """
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_read, args=[lines], daemon=True).start()
    _send_line(b"")
    for line in iter(lines.get, None):
        yield json.loads(line)


def _read(lines: SimpleQueue[bytes | None]) -> None:
    """Put requests into `lines`, and answer pings, until the input ends; then put None."""
    # The descriptor is read rather than sys.stdin, whose lock this thread would hold while the
    # interpreter shuts down.
    partial_line = b""
    while data := os.read(_STDIN, _READ_BYTES):
        *whole, partial_line = (partial_line + data).split(b"\n")
        for line in whole:
            if line:
                lines.put(line)
            else:
                _send_line(b"")
    lines.put(None)


def send_answer(value: object) -> None:
    """Send the answer to the latest request."""
    _send_line(json.dumps(value).encode())


def _send_line(line: bytes) -> None:
    unsent = memoryview(line + b"\n")
    with _write_lock:
        while unsent:
            sent_bytes = os.write(_STDOUT, unsent)
            unsent = unsent[sent_bytes:]
