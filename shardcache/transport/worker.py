"""Transport worker: a process that sends HTTP requests and writes the answers to files, with a thread per request.

The program reads messages from standard input and writes messages to standard output, each a line of JSON; `Workers` is
the other end. It exits at the end of its input, and so with the daemon, however that ends. It is a separate process so
that neither decryption nor checksums hold the daemon's interpreter, and small because there are several.
"""

from __future__ import annotations

import ctypes
import http.client
import os
import select
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from shardcache.transport.connections import NearHostError, Pool
from shardcache.transport.exchange import Exchange
from shardcache.transport.gate import CancelledError, Gate
from shardcache.transport.messages import HeadError, Message, decoded, encoded, request_from_json
from shardcache.transport.parts import PartFileError

_PR_SET_PDEATHSIG = 1
_IN, _OUT = 0, 1
_PROGRESS_S = 0.1
_EXPIRE_S = 1.0
_READ_BYTES = 256 * 1024
_MAX_THREADS = 1024  # one per request


class Worker:
    """Requests in flight, and the connections that they share."""

    def __init__(self) -> None:
        self._pool = Pool(lambda asked_s: self._send({"is": "silent", "asked_s": asked_s}))
        self._threads = ThreadPoolExecutor(_MAX_THREADS)
        self._gates: dict[int, Gate] = {}
        self._reported: dict[int, tuple[int, int]] = {}  # bytes received and written
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the input ends."""
        self._send({"is": "up"})
        for line in self._lines():
            message = decoded(line)
            match message.pop("do"):
                case "ask":
                    self._begin(message)
                case "cancel":
                    self._cancel(message["id"])
                case "pause":
                    self._gate(message).pause()
                case "resume":
                    self._gate(message).resume(_limit(message))
                case "commit":
                    self._gate(message).commit()
                case "ping":
                    self._send({"is": "up"})
                case "distrust":
                    self._pool.distrust(message["before_s"])

    def _lines(self) -> Iterator[bytes]:
        """Yield the input's lines; between them, report progress and close old connections at regular intervals."""
        partial_line, tick_s = b"", 0.0
        while True:
            is_readable = bool(select.select([_IN], [], [], _PROGRESS_S if self._gates else _EXPIRE_S)[0])
            if (now_s := time.monotonic()) >= tick_s:
                self._report_progress()
                self._pool.expire()
                tick_s = now_s + _PROGRESS_S
            if not is_readable:
                continue
            data = os.read(_IN, _READ_BYTES)
            if not data:
                return
            *lines, partial_line = (partial_line + data).split(b"\n")
            yield from lines

    def _begin(self, message: Message) -> None:
        number = message["id"]
        gate = self._gates[number] = Gate(_limit(message))
        request, body = request_from_json(message)
        held = partial(self._send, {"id": number, "is": "held"})
        exchange = Exchange(request, body, gate, held, self._report_progress, prompt=message["prompt"])
        self._threads.submit(self._work, number, exchange)

    def _work(self, number: int, exchange: Exchange) -> None:
        self._end(number, _outcome(exchange, self._pool))

    def _end(self, number: int, outcome: Message) -> None:
        gate = self._gates.pop(number, None)
        self._reported.pop(number, None)
        if gate is not None:
            self._send({"id": number, "received_bytes": gate.received_bytes, **outcome})

    def _cancel(self, number: int) -> None:
        gate = self._gates.get(number)
        if gate is None:
            return
        has_ended = gate.cancel()
        if gate.asked_idle_s is not None:
            self._pool.given_up(gate.asked_idle_s)
        if has_ended:
            self._end(number, {"is": "cancelled"})

    def _gate(self, message: Message) -> Gate:
        return self._gates.get(message["id"]) or Gate(0)  # the request may just have ended

    def _report_progress(self) -> None:
        counts = {number: (gate.received_bytes, gate.written_bytes) for number, gate in list(self._gates.items())}
        changed = {number: count for number, count in counts.items() if count != self._reported.get(number, (0, 0))}
        if changed:
            self._reported |= changed
            self._send({"is": "progress", "counts": [(number, *count) for number, count in changed.items()]})

    def _send(self, message: Message) -> None:
        line = memoryview(encoded(message))
        with self._sending:
            while line:
                line = line[os.write(_OUT, line) :]


def _outcome(exchange: Exchange, pool: Pool) -> Message:
    try:
        return {"is": "answer", "answer": exchange.run(pool).to_json()}
    except CancelledError:
        return {"is": "cancelled"}
    except PartFileError as exn:
        return {"is": "disk", "errno": exn.cause.errno, "reason": exn.cause.strerror}
    except NearHostError as exn:
        return {"is": "near", "reason": str(exn)}
    except ssl.SSLCertVerificationError as exn:
        return {"is": "certificate", "reason": exn.verify_message}
    except HeadError as exn:
        return {"is": "head", "reason": str(exn)}
    except (OSError, ValueError, http.client.HTTPException) as exn:
        return {"is": "failed", "reason": str(exn) or type(exn).__name__}


def _limit(message: Message) -> float:
    limit: float | None = message["limit_bytes"]
    return float("inf") if limit is None else limit


def main() -> None:
    """Run the worker; the only argument is the daemon's pid."""
    # This process dies with a killed daemon, even in mid-work (prctl(2)): the next daemon may write the same files.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(sys.argv[1]):  # otherwise the daemon was killed before that call
        with suppress(BrokenPipeError):  # it has been killed since, and this process is about to be
            Worker().run()
    os._exit(0)  # does not wait for threads that wait for a server


if __name__ == "__main__":
    main()
