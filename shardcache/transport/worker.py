"""Transport worker: a process that sends HTTP requests and writes the answers to files.

The daemon starts several workers (`worker_pool.Workers`) and sends them messages over their
standard input; a worker replies over its standard output. Each message is a line of JSON. Workers
are separate processes so that neither decryption nor checksums hold the daemon's interpreter lock.
A worker runs each request in a thread of its own. The worker exits when its input ends, which is
also the case when the daemon is killed.

An exchange is one request with its answer. A request is primed if it was sent ahead of its
exchange, so that the answer is on its way when the exchange begins. A body is held if it waits in
memory until the daemon commits it, that is, allows it to be written to its file. A gate is the link
through which the daemon's messages reach an exchange's thread.
"""

import ctypes
import http.client
import math
import os
import select
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from shardcache.transport.between import descriptors
from shardcache.transport.between.checksums import checksum_function
from shardcache.transport.between.messages import Body, Message, decoded, encoded, request_from_json
from shardcache.transport.between.parts import PartFileError
from shardcache.transport.http.exchange import Exchange
from shardcache.transport.http.gate import CancelledError, Gate
from shardcache.transport.http.http_heads import HeadError
from shardcache.transport.http.pool import Pool, Primed
from shardcache.transport.http.sockets import NearHostError

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_STDIN = 0
_STDOUT = 1
_PROGRESS_S = 0.1  # between two reports of progress
_EXPIRE_S = 1.0  # between two checks of idle connections, while there are no requests
_MAX_PRIMED = 8  # limit on requests that were sent ahead and have no exchange yet
_READ_BYTES = 256 * 1024
_MAX_THREADS = 1024  # each request takes one thread


class Worker:
    """The worker's requests in flight, and the connections that they share.

    Args:
        files_socket: socket over which the daemon sends the descriptors of files that have no name.
    """

    def __init__(self, files_socket: socket.socket) -> None:
        self._files_socket = files_socket
        self._pool = Pool(self._report_silence)
        self._threads = ThreadPoolExecutor(_MAX_THREADS)
        # By request number: the gates of the requests whose end has not been reported.
        self._gates: dict[int, Gate] = {}
        # By request number: the numbers of bytes received and written that were last reported.
        self._reported: dict[int, tuple[int, int]] = {}
        self._sending = threading.Lock()  # keeps the messages of several threads apart

    def run(self) -> None:
        """Carry out the daemon's messages until the input ends."""
        self._send({"is": "up"})
        for line in self._lines():
            message = decoded(line)
            match message.pop("do"):
                case "ask":
                    self._begin(message)
                case "prime":
                    self._prime(message)
                case "cancel":
                    self._cancel(message["id"])
                case "pause":
                    self._gate(message).pause()
                case "resume":
                    self._gate(message).resume(_limit_bytes_in(message))
                case "commit":  # a held body may be written
                    self._gate(message).commit()
                case "ping":  # any reply shows that this worker does not hang
                    self._send({"is": "up"})
                case "distrust":  # connections may be dead, and are closed
                    self._pool.distrust(message["before_s"])

    def _lines(self) -> Iterator[bytes]:
        """Yield the input's lines.

        Progress is reported and old connections are closed at regular intervals, even while no line
        arrives.
        """
        partial_line = b""
        next_report_s = 0.0  # by the monotonic clock
        while True:
            wait_s = _PROGRESS_S if self._gates else _EXPIRE_S
            readable, _, _ = select.select([_STDIN], [], [], wait_s)
            now_s = time.monotonic()
            if now_s >= next_report_s:
                self._report_progress()
                self._pool.expire()
                next_report_s = now_s + _PROGRESS_S
            if not readable:
                continue

            data = os.read(_STDIN, _READ_BYTES)
            if not data:
                return
            *lines, partial_line = (partial_line + data).split(b"\n")
            yield from lines

    def _begin(self, message: Message) -> None:
        """Begin a request's exchange, in a thread of its own."""
        number = message["id"]
        gate = Gate(_limit_bytes_in(message))
        self._gates[number] = gate
        request, body = request_from_json(message)
        fd = None
        if body is not None and "file" in message:
            try:
                fd = descriptors.receive(self._files_socket, tuple(message["file"]))
            except OSError as exn:
                self._report_end(number, _disk_error(exn))
                return
            body = _with_descriptor(body, fd)

        # Tells the daemon that a held body has arrived and waits to be committed.
        report_held = partial(self._send, {"id": number, "is": "held"})
        exchange = Exchange(
            request,
            body,
            gate,
            report_held,
            self._report_progress,
            prompt=message["prompt"],  # True if a reader waits for the first bytes
        )
        self._threads.submit(self._run, number, exchange, fd)

    def _run(self, number: int, exchange: Exchange, fd: int | None) -> None:
        """Run an exchange to its end, in its thread, and report how it has ended.

        Args:
            fd: the file's descriptor, which is closed here; None if the file is opened by its path,
                or there is no body.
        """
        try:
            outcome = _outcome_of(exchange, self._pool)
        finally:
            if fd is not None:
                os.close(fd)
        self._report_end(number, outcome)

    def _prime(self, message: Message) -> None:
        """Send a request ahead of its exchange.

        Nothing is sent if `_MAX_PRIMED` requests already wait for their exchanges, or if this one
        does.
        """
        request, _ = request_from_json(message)
        if len(self._pool.primed) < _MAX_PRIMED and request.url not in self._pool.primed:
            # The byte credit of its body is set by its exchange, which has another gate.
            gate = Gate(math.inf)
            opening = self._threads.submit(self._pool.prime, request, gate)
            self._pool.primed[request.url] = Primed(gate, opening)

    def _report_end(self, number: int, outcome: Message) -> None:
        """Report how a request has ended, unless its end was already reported."""
        gate = self._gates.pop(number, None)
        self._reported.pop(number, None)
        if gate is not None:
            received = {
                "received_bytes": gate.received_bytes,
                "first_byte_s": gate.first_byte_s,
            }
            self._send({"id": number, **received, **outcome})

    def _cancel(self, number: int) -> None:
        """Cancel a request.

        Its end is reported now, or once its thread has stopped writing to the file.
        """
        gate = self._gates.get(number)
        if gate is None:
            return
        has_ended = gate.cancel()
        # If the request was sent over a reused connection and got no answer, a NAT or load balancer
        # may have dropped that connection. The pool may then distrust the other idle ones as well.
        if gate.unanswered_since_s is not None:
            self._pool.record_cancellation(gate.unanswered_since_s)
        if has_ended:
            self._report_end(number, {"is": "cancelled"})

    def _gate(self, message: Message) -> Gate:
        """Return the gate of the request that a message is about.

        If the request has just ended, this is a new gate that nothing waits for.
        """
        return self._gates.get(message["id"]) or Gate(limit_bytes=0)

    def _report_silence(self, asked_s: float) -> None:
        """Report that a server gave no answer over a reused connection.

        Args:
            asked_s: when the request was sent, by the monotonic clock.
        """
        self._send({"is": "silent", "asked_s": asked_s})

    def _report_progress(self) -> None:
        """Report the requests whose numbers of bytes have changed since the last report."""
        # Rows of request number, bytes received, bytes written, and time of the first byte.
        rows: list[tuple[int, int, int, float | None]] = []
        for number, gate in list(self._gates.items()):
            counts = (gate.received_bytes, gate.written_bytes)
            if counts != self._reported.get(number, (0, 0)):
                self._reported[number] = counts
                rows.append((number, *counts, gate.first_byte_s))
        if rows:
            self._send({"is": "progress", "counts": rows})

    def _send(self, message: Message) -> None:
        """Write a message to the output. Any thread may call it."""
        line = memoryview(encoded(message))
        with self._sending:
            while line:
                line = line[os.write(_STDOUT, line) :]


def _with_descriptor(body: Body, fd: int) -> Body:
    """Return the body with the descriptor of its file."""
    return replace(body, parts=replace(body.parts, fd=fd))


def _outcome_of(exchange: Exchange, pool: Pool) -> Message:
    """Run an exchange to its end; return its answer, or its failure, as a message."""
    try:
        return {"is": "answer", "answer": exchange.run(pool).to_json()}
    except CancelledError:
        return {"is": "cancelled"}
    except PartFileError as exn:
        return _disk_error(exn.cause)
    except NearHostError as exn:
        # The host's name leads to this node or to its cloud's metadata service.
        return {"is": "near", "reason": str(exn)}
    except ssl.SSLCertVerificationError as exn:
        return {"is": "certificate", "reason": exn.verify_message}
    except HeadError as exn:
        return {"is": "head", "reason": str(exn)}
    except (OSError, ValueError, http.client.HTTPException) as exn:
        return {"is": "failed", "reason": str(exn) or type(exn).__name__}


def _disk_error(exn: OSError) -> Message:
    return {"is": "disk", "errno": exn.errno, "reason": exn.strerror}


def _limit_bytes_in(message: Message) -> float:
    """Return how many bytes of the body may be read in total, those already read included.

    The result is infinite if the message has no limit.
    """
    limit_bytes: float | None = message["limit_bytes"]
    return math.inf if limit_bytes is None else limit_bytes


def main() -> None:
    """Run the worker.

    The command line has two arguments: the daemon's pid, and the number of the inherited socket
    over which file descriptors arrive.
    """
    daemon_pid = int(sys.argv[1])
    files_fd = int(sys.argv[2])
    # The kernel kills this process when the daemon dies, even in the middle of a write (prctl(2)).
    # Otherwise it might write to files that the next daemon writes, too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The checksum library is loaded now, so that the first bytes need not wait for the import.
    checksum_function("crc32c")
    # If the daemon died before the prctl call, the kernel sends no signal; the process then has
    # another parent, and exits.
    if os.getppid() == daemon_pid:
        # Writing to a daemon that has just been killed raises BrokenPipeError.
        with suppress(BrokenPipeError):
            Worker(socket.socket(fileno=files_fd)).run()
    os._exit(0)  # without waiting for threads that still wait for a server


if __name__ == "__main__":
    main()
