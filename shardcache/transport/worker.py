"""Transport worker: a process that sends HTTP requests and writes the answers to files, with a thread per request.

The program reads messages from standard input and writes messages to standard output, each a line of JSON; `Workers` is
the other end. It exits at the end of its input, and so with the daemon, however that ends. It is a separate process so
that neither decryption nor checksums hold the daemon's interpreter, and small because there are several.
"""

import ctypes
import http.client
import math
import mmap
import os
import select
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus

from shardcache.transport import connections, descriptors, messages
from shardcache.transport.parts import PartFileError, PartSums, PartsWriter, checksum_function, write_parts, writing
from shardcache.transport.tls import TlsSocket

_PR_SET_PDEATHSIG = 1
_IN, _OUT = 0, 1
_PROGRESS_S = 0.1
_EXPIRE_S = 1.0
_MAX_PRIMED = 8
_BUSY = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}  # whatever is requested
_READ_BYTES = 256 * 1024
_MAX_THREADS = 1024  # one per request
# An unwanted body is read to its end if a new connection would cost more.
_SHORT_BYTES = 64 * 1024
_DRAIN_S = 1.0
# Bytes read, summed and written at a time, at most: for each call the interpreter's lock is handed over.
_BLOCK_BYTES = 1024 * 1024
# Longest wait for all of a block, a `struct timeval`: what has arrived until then is written. TLS has its own.
_TICK, _NO_TICK = struct.pack("ll", 0, 100_000), struct.pack("ll", 0, 0)
_CHUNK_BYTES = 16 * 1024
_memory = threading.local()


class StaleError(Exception):
    """A reused connection has been closed, or stays silent; or a primed one brings another answer than expected."""


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request and its answer. Runs in a thread of its own; blocks."""

    _request: messages.Request
    _body: messages.Body | None
    _gate: connections.Gate
    _held: Callable[[], None]  # called when a held body has arrived
    _progress: Callable[[], None]  # called when the body begins and when its byte credit is used up
    prompt: bool = field(default=False, kw_only=True)  # True to call that for every MiB that is written, too

    def run(self, pool: connections.Pool) -> messages.Answer:
        """Return the answer; its body is in the file if the answer is as expected.

        Raises OSError and http.client.HTTPException if the connection fails or the answer is not HTTP; NearHostError,
        PartFileError, CancelledError.
        """
        self._gate.ready(1)
        server = connections.server_of(self._request)
        for take in (self._primed, lambda pool: pool.take(server)):
            try:
                if (connection := take(pool)) is not None:
                    return self._ask(pool, connection)
            except StaleError:
                self._gate.check()
        try:
            connection = connections.open_connection(server, self._gate)
        except connections.ProxyError as exn:
            if exn.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:  # same answer as without a tunnel
                return messages.Answer(exn.status, {})
            raise
        return self._ask(pool, connection)

    def _primed(self, pool: connections.Pool) -> connections.HttpConnection | None:
        """Return the connection on which this request was sent ahead, if it was."""
        parts = self._body.parts if self._body is not None else None
        is_first = parts is not None and parts.start == 0 and parts.count == 1
        if not is_first or (primed := pool.primed.pop(self._request.url, None)) is None:
            return None
        try:
            with self._gate.cancellable(primed.gate.cancel):
                return primed.opening.result()
        except (OSError, http.client.HTTPException, connections.NearHostError) as exn:
            raise StaleError from exn

    def _ask(self, pool: connections.Pool, connection: connections.HttpConnection) -> messages.Answer:
        reusable, primed = False, connection.is_primed
        try:
            # The response is closed, else it keeps the socket open.
            with self._gate.cancellable(connection.end_reads), closing(self._response(pool, connection)) as response:
                headers = {name.lower(): ", ".join(response.headers.get_all(name, [])) for name in response.headers}
                sums = None
                if self._body is not None and self._is_expected(self._body, response, headers):
                    sums, whole = self._take(self._body, response, connection.socket)
                elif primed and response.status not in _BUSY:
                    raise StaleError
                else:
                    whole = self._drain(response, headers, connection.socket)
                reusable = whole and not response.will_close
        finally:
            if reusable:
                pool.keep(connections.server_of(self._request), connection)
            else:
                connection.close()
        # Of an expected answer, one header is needed; there are a hundred such answers per GB.
        kept = {name: headers[name] for name in messages.KEPT & headers.keys()} if sums else headers
        return messages.Answer(response.status, kept, sums)

    def _drain(self, response: messages.Response, headers: dict[str, str], sock: socket.socket) -> bool:
        """Read a short unwanted body, such as an error's, and return whether its end was reached."""
        is_odd = messages.number_in(headers.get("content-length", "0")) is None
        if is_odd or response.length is None or response.length > _SHORT_BYTES:
            return False
        sock.settimeout(_DRAIN_S)
        try:
            response.read()
        except (OSError, http.client.HTTPException):
            return False
        sock.settimeout(None)
        return True

    def _response(self, pool: connections.Pool, connection: connections.HttpConnection) -> messages.Response:
        """Send the request and read the answer's head. Raises StaleError if a reused connection fails."""
        if connection.heard_s is None:
            primed = connection.is_primed
            try:
                return self._head(connection, None)
            except (OSError, http.client.HTTPException) as exn:
                if primed:
                    raise StaleError from exn
                raise
        asked_s, patience_s = time.monotonic(), pool.patience_s
        if self._request.via is None:
            self._gate.asked_idle_s = asked_s
        else:
            patience_s = None  # no network in between drops idle connections, and the tier may answer late
        try:
            response = self._head(connection, patience_s)
        except OSError as exn:
            if isinstance(exn, TimeoutError):
                pool.silent(asked_s)
            raise StaleError from exn
        self._gate.asked_idle_s = None
        pool.answered()
        return response

    def _head(self, connection: connections.HttpConnection, patience_s: float | None) -> messages.Response:
        response = messages.Response(connection.socket, method=self._request.method)
        try:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_TICK)
            if not connection.is_primed:
                connection.socket.sendall(messages.request_head(self._request))
            connection.is_primed = False
            connection.socket.settimeout(patience_s)
            response.receive()
            connection.socket.settimeout(None)
        except BaseException:
            response.close()
            raise
        return response

    def _is_expected(self, body: messages.Body, response: messages.Response, headers: dict[str, str]) -> bool:
        if response.chunked:
            # A chunked body is written only after all of it has arrived.
            right_size = body.parts.size_bytes <= body.parts.part_bytes and (
                body.encoded_chunks or headers.get("content-encoding", "identity") == "identity"
            )
        else:
            right_size = set(response.headers.get_all("content-length", [])) == {str(body.parts.size_bytes)}
        return (
            response.status == body.status
            and right_size
            and all(headers.get(name) in values for name, values in body.expected.items())
        )

    def _take(
        self, body: messages.Body, response: messages.Response, sock: socket.socket
    ) -> tuple[list[PartSums] | None, bool]:
        """Write the body. Return its checksums, and whether the connection is at the answer's end.

        A chunked body that is longer than expected is not written and has no checksums.
        """
        if body.held or response.chunked:
            return self._take_held(body, response, sock)
        read = _BodyReader(response, sock)
        with writing(body.parts) as writer:
            self._copy(body.parts.size_bytes, read, writer)
        return writer.finished, not read.has_more

    def _take_held(
        self, body: messages.Body, response: messages.Response, sock: socket.socket
    ) -> tuple[list[PartSums] | None, bool]:
        memory = _page_aligned(body.parts.size_bytes)
        read = _ChunksReader(response) if response.chunked else _BodyReader(response, sock)
        filled_bytes = 0
        while filled_bytes < len(memory):
            filled_bytes += self._receive(memory[filled_bytes:], read)
        if response.chunked and read.has_more:
            return None, False
        if body.held:
            self._held()
            self._gate.committed()
        with self._gate.writing():
            return write_parts(body.parts, memory), not read.has_more

    def _copy(self, size_bytes: int, read: "_BodyReader | _ChunksReader", writer: PartsWriter) -> None:
        if not hasattr(_memory, "block"):
            _memory.block = _page_aligned(_BLOCK_BYTES + mmap.PAGESIZE)
        while (at := self._gate.written_bytes) < size_bytes:
            block = _memory.block[at % mmap.PAGESIZE :][: min(_BLOCK_BYTES, size_bytes - at)]
            count = self._receive(block, read)
            with self._gate.writing():
                writer.write(block[:count])
            self._gate.written_bytes += count
            if self.prompt and (at + count) // _BLOCK_BYTES > at // _BLOCK_BYTES:
                self._progress()

    def _receive(self, memory: memoryview, read: "_BodyReader | _ChunksReader") -> int:
        """Fill some or all of the memory and return the number of bytes."""
        count = read(memory[: self._gate.ready(len(memory))])
        if not count:
            raise ConnectionResetError("the server closed the connection before the end of the body")
        if self._gate.receive(count):
            self._progress()
        return count


def _page_aligned(size_bytes: int) -> memoryview:
    """Return zeroed memory that does not begin 16 bytes into a page, as malloc's does.

    AMD's Zen 3 and 4 copy (`rep movsb`) at a third of the speed to 1 to 31 bytes further into a page than from where.
    """
    memory = memoryview(bytearray(size_bytes + mmap.PAGESIZE))
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % mmap.PAGESIZE
    return memory[start : start + size_bytes]


class _BodyReader:
    """Reads a body of known length: first the bytes that arrived with the head, then from the socket."""

    def __init__(self, response: messages.Response, sock: socket.socket) -> None:
        ahead_bytes, length = len(response.fp.peek()), response.length or 0
        self._fp = response.fp
        self._ahead_bytes = min(ahead_bytes, length)
        self._sock, self._flags, self._poller = sock, 0, select.poll()
        if not isinstance(sock, TlsSocket):
            self._poller.register(sock, select.POLLIN)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TICK)
        self.has_more = ahead_bytes > length

    def __call__(self, memory: memoryview) -> int:
        """Fill some or all of the memory and return the number of bytes; 0 at the stream's end."""
        if self._ahead_bytes:
            count = self._fp.readinto(memory[: self._ahead_bytes])
            self._ahead_bytes -= count
            return count
        if isinstance(self._sock, TlsSocket):
            return self._sock.fill(memory)
        flags, self._flags = self._flags, socket.MSG_WAITALL  # the first bytes are reported at once
        self._poller.poll()  # however long: from then on, each tick has some bytes
        return self._sock.recv_into(memory, flags=flags)


class _ChunksReader:
    """Reads a chunked body."""

    def __init__(self, response: messages.Response) -> None:
        self._response = response

    @property
    def has_more(self) -> bool:
        """True if the body has not ended. Blocks."""
        return bool(self._response.read(1))

    def __call__(self, memory: memoryview) -> int:
        """As `_BodyReader`."""
        return self._response.readinto(memory[:_CHUNK_BYTES])


class Worker:
    """Requests in flight, and the connections that they share; descriptors of files without a name come by a socket."""

    def __init__(self, files: socket.socket) -> None:
        self._files = files
        self._pool = connections.Pool(lambda asked_s: self._send({"is": "silent", "asked_s": asked_s}))
        self._threads = ThreadPoolExecutor(_MAX_THREADS)
        self._gates: dict[int, connections.Gate] = {}
        self._reported: dict[int, tuple[int, int]] = {}  # bytes received and written
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the input ends."""
        self._send({"is": "up"})
        for line in self._lines():
            message = messages.decoded(line)
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

    def _begin(self, message: messages.Message) -> None:
        number = message["id"]
        gate = self._gates[number] = connections.Gate(_limit(message))
        request, body = messages.request_from_json(message)
        fd = None
        if body is not None and "file" in message:
            try:
                fd = descriptors.receive(self._files, tuple(message["file"]))
            except OSError as exn:
                self._end(number, _disk_error(exn))
                return
            body = replace(body, parts=replace(body.parts, fd=fd))

        held = partial(self._send, {"id": number, "is": "held"})
        exchange = Exchange(request, body, gate, held, self._report_progress, prompt=message["prompt"])
        self._threads.submit(self._run, number, exchange, fd)

    def _run(self, number: int, exchange: Exchange, fd: int | None) -> None:
        try:
            outcome = _outcome(exchange, self._pool)
        finally:
            if fd is not None:
                os.close(fd)
        self._end(number, outcome)

    def _prime(self, message: messages.Message) -> None:
        """Send a request whose exchange has not begun, unless several are waiting for theirs."""
        request, _ = messages.request_from_json(message)
        if len(self._pool.primed) < _MAX_PRIMED and request.url not in self._pool.primed:
            gate = connections.Gate(math.inf)
            opening = self._threads.submit(self._pool.prime, request, gate)
            self._pool.primed[request.url] = connections.Primed(gate, opening)

    def _end(self, number: int, outcome: messages.Message) -> None:
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

    def _gate(self, message: messages.Message) -> connections.Gate:
        return self._gates.get(message["id"]) or connections.Gate(0)  # the request may just have ended

    def _report_progress(self) -> None:
        counts = {number: (gate.received_bytes, gate.written_bytes) for number, gate in list(self._gates.items())}
        changed = {number: count for number, count in counts.items() if count != self._reported.get(number, (0, 0))}
        if changed:
            self._reported |= changed
            self._send({"is": "progress", "counts": [(number, *count) for number, count in changed.items()]})

    def _send(self, message: messages.Message) -> None:
        line = memoryview(messages.encoded(message))
        with self._sending:
            while line:
                line = line[os.write(_OUT, line) :]


def _outcome(exchange: Exchange, pool: connections.Pool) -> messages.Message:
    try:
        return {"is": "answer", "answer": exchange.run(pool).to_json()}
    except connections.CancelledError:
        return {"is": "cancelled"}
    except PartFileError as exn:
        return _disk_error(exn.cause)
    except connections.NearHostError as exn:
        return {"is": "near", "reason": str(exn)}
    except ssl.SSLCertVerificationError as exn:
        return {"is": "certificate", "reason": exn.verify_message}
    except messages.HeadError as exn:
        return {"is": "head", "reason": str(exn)}
    except (OSError, ValueError, http.client.HTTPException) as exn:
        return {"is": "failed", "reason": str(exn) or type(exn).__name__}


def _disk_error(exn: OSError) -> messages.Message:
    return {"is": "disk", "errno": exn.errno, "reason": exn.strerror}


def _limit(message: messages.Message) -> float:
    limit: float | None = message["limit_bytes"]
    return float("inf") if limit is None else limit


def main() -> None:
    """Run the worker; its arguments are the daemon's pid, and the descriptor of the socket for descriptors."""
    # This process dies with a killed daemon, even in mid-work (prctl(2)): the next daemon may write the same files.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    checksum_function("crc32c")  # imported now, rather than when the first bytes come
    if os.getppid() == int(sys.argv[1]):  # otherwise the daemon was killed before that call
        with suppress(BrokenPipeError):  # it has been killed since, and this process is about to be
            Worker(socket.socket(fileno=int(sys.argv[2]))).run()
    os._exit(0)  # does not wait for threads that wait for a server


if __name__ == "__main__":
    main()
