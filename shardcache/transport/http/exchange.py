"""One HTTP request and its answer, whose body is written to a file.

A transport worker, a process that sends requests for the daemon, runs each request as an `Exchange`
in a thread of its own. The exchange finds a connection, sends the request, reads the answer's head,
and writes the body if the answer is the expected one.

- part: the unit in which a file is checksummed and recorded;
- primed request: one that was sent ahead of its exchange;
- held body: one that waits in memory until the daemon commits it, that is, allows it to be written;
- idle connection: one that is kept open after an earlier request;
- gate: the exchange's link to the daemon's messages, which pauses and cancels the exchange, commits
  its body, and grants it byte credit, the number of bytes of the body that may be read.
"""

import ctypes
import http.client
import mmap
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias

from shardcache.transport.between.messages import KEPT_HEADERS, Answer, Body, Request
from shardcache.transport.between.parts import PartSums, PartsWriter, write_parts, writing
from shardcache.transport.http.body_readers import BodyReader, ChunksReader, wait_without_limit
from shardcache.transport.http.gate import Gate
from shardcache.transport.http.http_heads import Response, number_in, request_head
from shardcache.transport.http.opening import HttpConnection, ProxyError, open_connection, server_of
from shardcache.transport.http.pool import Pool
from shardcache.transport.http.sockets import NearHostError

# Statuses with which a busy server answers any request. If a primed request gets one of them, it is
# the exchange's answer: sending the request again would add to the load.
_BUSY = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
# An unwanted body of this size at most is read to its end, so that its connection can be reused:
# reading it costs less than opening a new connection.
_SHORT_BYTES = 64 * 1024
_DRAIN_S = 1.0  # longest wait for more bytes of an unwanted body
# Maximum number of bytes that are read, summed and written at a time. Each of these calls releases
# and takes the interpreter lock, so smaller blocks would cost more.
_BLOCK_BYTES = 1024 * 1024
_MIB = 1024 * 1024

_memory = threading.local()  # its `block` is a thread's memory for one block of a body

AnyReader: TypeAlias = BodyReader | ChunksReader


class StaleError(Exception):
    """The connection cannot be used, and the request has to be sent over another one.

    That is so if a reused connection is closed or silent, or if the answer to a primed request is
    not the expected one.
    """


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request and its answer. Its methods block, so it runs in a thread of its own.

    Args:
        _body: the expected body and its destination; None if no body is to be written.
        _gate: the request's gate, which belongs to no other request.
        _report_held: called when a held body has arrived in memory.
        _report_progress: called when the first bytes of a long body have arrived, and when the byte
            credit is used up. The first bytes of a short body are reported together with its end,
            or with the worker's next regular report if that comes first.

    Attributes:
        prompt: True if a reader waits for the first bytes; progress is then also reported for the
            first bytes of a short body, and for every MiB written.
    """

    _request: Request
    _body: Body | None
    _gate: Gate
    _report_held: Callable[[], None]
    _report_progress: Callable[[], None]
    prompt: bool = field(default=False, kw_only=True)

    def run(self, pool: Pool) -> Answer:
        """Return the answer. Its body is then in the file if the answer is the expected one.

        Raises OSError and http.client.HTTPException if the connection fails or the answer is not
        HTTP; NearHostError, PartFileError, CancelledError.
        """
        # The request may have been paused before it began: wait until a byte may be read.
        self._gate.wait_to_read(1)
        # The connection that gives the earliest answer is tried first:
        # 1. the connection on which this request was already sent ahead;
        # 2. an idle connection, which needs no handshake.
        # Either may turn out to be dead (StaleError); then the next is tried.
        for take in (self._take_primed, self._take_idle):
            try:
                connection = take(pool)
                if connection is not None:
                    return self._ask(pool, connection)
            except StaleError:
                self._gate.raise_if_cancelled()  # a cancellation makes the connection fail, too
                # From now on, a cancellation says nothing about the connection that has failed.
                self._gate.unanswered_since_s = None

        # 3. a new connection.
        try:
            connection = open_connection(server_of(self._request), self._gate)
        except ProxyError as exn:
            # For a plain-HTTP url, no tunnel is needed, and a proxy's 407 is the answer to the
            # request. The caller gets the same answer if a tunnel is refused.
            if exn.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
                return Answer(exn.status, {})
            raise
        return self._ask(pool, connection)

    def _take_primed(self, pool: Pool) -> HttpConnection | None:
        """Return the connection on which this request was sent ahead, if it was."""
        if self._body is None:
            return None
        parts = self._body.parts
        if parts.start != 0 or parts.count != 1:
            return None  # only requests for an object's first part are sent ahead
        primed = pool.primed.pop(self._request.url, None)
        if primed is None:
            return None
        try:
            with self._gate.cancellable(primed.gate.cancel):
                return primed.opening.result()
        except (OSError, http.client.HTTPException, NearHostError) as exn:
            raise StaleError from exn

    def _take_idle(self, pool: Pool) -> HttpConnection | None:
        """Return an idle connection to the request's server, if there is one."""
        return pool.take(server_of(self._request))

    def _ask(self, pool: Pool, connection: HttpConnection) -> Answer:
        """Return the answer over a connection; then keep the connection for reuse, or close it.

        Raises StaleError if the request has to be sent over another connection.
        """
        is_reusable = False
        try:
            with (
                self._gate.cancellable(connection.end_reads),
                # The response is closed because it would otherwise keep the socket open.
                closing(self._get_response(pool, connection)) as response,
            ):
                sums = None
                if self._body is not None and _is_expected(self._body, response):
                    sums, is_at_end = self._write(self._body, response, connection.socket)
                elif connection.is_primed and response.status not in _BUSY:
                    raise StaleError
                else:
                    is_at_end = _drain(response, connection.socket)
                is_reusable = is_at_end and not response.will_close
        finally:
            if is_reusable:
                pool.keep(server_of(self._request), connection)
            else:
                connection.close()

        headers = response.head
        if sums:
            # Of an expected answer, the daemon needs only these headers. The others are dropped to
            # keep its message short: there are a hundred expected answers per GB.
            headers = {name: headers[name] for name in KEPT_HEADERS & headers.keys()}
        return Answer(response.status, headers, sums)

    # The head of the answer

    def _get_response(self, pool: Pool, connection: HttpConnection) -> Response:
        """Send the request and read the answer's head.

        Raises StaleError if a reused connection or a primed request fails.
        """
        was_used_before = connection.last_answer_s is not None
        if was_used_before:
            return self._get_response_over_idle(pool, connection)
        try:
            # The connection is new, so the server may take any time to answer.
            return self._exchange_heads(connection, patience_s=None)
        except (OSError, http.client.HTTPException) as exn:
            if connection.is_primed:
                raise StaleError from exn
            raise

    def _get_response_over_idle(self, pool: Pool, connection: HttpConnection) -> Response:
        """Send the request over an idle connection and read the answer's head.

        A NAT or load balancer may have dropped the connection without notice. So if the server
        stays silent for the pool's patience, the request is sent again over another connection.

        Raises StaleError if the connection fails or the server stays silent.
        """
        asked_s = time.monotonic()
        if self._request.via is None:
            patience_s = pool.patience_s
            # If this request is cancelled before its answer, the connection may count as silent.
            self._gate.unanswered_since_s = asked_s
        else:
            # The request goes through a Unix socket, so no network can drop the connection. The
            # server behind the socket may answer late.
            patience_s = None
        try:
            response = self._exchange_heads(connection, patience_s)
        except OSError as exn:
            if isinstance(exn, TimeoutError):
                pool.record_silence(asked_s)
            raise StaleError from exn
        self._gate.unanswered_since_s = None
        pool.record_answer()
        return response

    def _exchange_heads(self, connection: HttpConnection, patience_s: float | None) -> Response:
        """Send the request, unless it was sent ahead, and read the answer's head.

        Args:
            patience_s: longest time that the server may stay silent until the head has ended; None
                for no limit.
        """
        response = Response(connection.socket, self._request.method)
        try:
            wait_without_limit(connection.socket)
            if not connection.is_primed:
                connection.socket.sendall(request_head(self._request))
            connection.socket.settimeout(patience_s)
            response.read_head()
            connection.socket.settimeout(None)
        except BaseException:
            response.close()
            raise
        return response

    # The body

    def _write(
        self,
        body: Body,
        response: Response,
        sock: socket.socket,
    ) -> tuple[list[PartSums] | None, bool]:
        """Write the body to its file.

        Returns:
            The parts' checksums, or None for a chunked body that is longer than expected, which is
            not written; and True if the connection is at the answer's end, so that it can be
            reused.
        """
        if body.held or response.chunked:
            return self._write_when_complete(body, response, sock)
        reader = BodyReader(response, sock)
        with writing(body.parts) as writer:
            self._copy(body.parts.size_bytes, reader, writer)
        return writer.finished, not reader.has_more

    def _write_when_complete(
        self,
        body: Body,
        response: Response,
        sock: socket.socket,
    ) -> tuple[list[PartSums] | None, bool]:
        """Write as `_write` does, but only once the whole body has arrived in memory.

        A held body also waits for the daemon's commit.
        """
        memory = _page_aligned(body.parts.size_bytes)
        reader = ChunksReader(response) if response.chunked else BodyReader(response, sock)
        filled_bytes = 0
        while filled_bytes < len(memory):
            filled_bytes += self._receive(memory[filled_bytes:], reader)
        if response.chunked and reader.has_more:
            return None, False
        if body.held:
            self._report_held()
            self._gate.wait_for_commit()
        with self._gate.writing():
            return write_parts(body.parts, memory), not reader.has_more

    def _copy(self, size_bytes: int, reader: AnyReader, writer: PartsWriter) -> None:
        """Write a body block by block, as its bytes arrive.

        Args:
            size_bytes: size of the whole body.
        """
        if not hasattr(_memory, "block"):
            _memory.block = _page_aligned(_BLOCK_BYTES + mmap.PAGESIZE)
        gate = self._gate
        while gate.written_bytes < size_bytes:
            offset = gate.written_bytes
            wanted_bytes = min(_BLOCK_BYTES, size_bytes - offset)
            # A block has the same offset within a page of memory as within a page of the file,
            # because bytes are copied faster between equal offsets (`_page_aligned`).
            start = offset % mmap.PAGESIZE
            block = _memory.block[start : start + wanted_bytes]
            count = self._receive(block, reader)
            with gate.writing():
                writer.write(block[:count])
            gate.written_bytes += count

            has_filled_mib = gate.written_bytes // _MIB > offset // _MIB
            if self.prompt and has_filled_mib:
                self._report_progress()

    def _receive(self, memory: memoryview, reader: AnyReader) -> int:
        """Read the next bytes into the memory once the gate permits; return their number.

        Raises ConnectionResetError at the stream's end.
        """
        permitted_bytes = self._gate.wait_to_read(len(memory))
        count = reader.read_into(memory[:permitted_bytes])
        if not count:
            message = "the server closed the connection before the end of the body"
            raise ConnectionResetError(message)
        is_first = self._gate.first_byte_s is None
        self._gate.record_received(count)
        if self._gate.is_credit_used_up or (is_first and self._reports_first_bytes):
            self._report_progress()
        return count

    @property
    def _reports_first_bytes(self) -> bool:
        """True if the first bytes are reported before the body has ended."""
        is_long = self._body is not None and self._body.parts.size_bytes > _BLOCK_BYTES
        return self.prompt or is_long


def _is_expected(body: Body, response: Response) -> bool:
    """Return whether an answer's body is to be written, as far as its head tells.

    The head does not state the size of a chunked body, which is checked once the body has arrived.
    """
    if response.status != body.status:
        return False
    if response.chunked:
        has_right_body = _may_be_chunked(body, response)
    else:
        has_right_body = response.head.get("content-length") == str(body.parts.size_bytes)
    if not has_right_body:
        return False
    return all(response.head.get(name) in values for name, values in body.expected.items())


def _may_be_chunked(body: Body, response: Response) -> bool:
    """Return whether a chunked body is accepted in place of one with a stated size."""
    # A chunked body stays in memory until all of it has arrived, so it may be one part at most.
    if body.parts.size_bytes > body.parts.part_bytes:
        return False
    is_encoded = response.head.get("content-encoding", "identity") != "identity"
    return body.encoded_chunks or not is_encoded


def _drain(response: Response, sock: socket.socket) -> bool:
    """Read a short unwanted body, such as that of an error, so that its connection can be reused.

    Return whether the end of the body was reached.
    """
    # The stated length is checked first, as `response.length` is 0 for a 304 whatever it states.
    # After an invalid length, the connection is not reused.
    stated_length = response.head.get("content-length")
    if stated_length is not None and number_in(stated_length) is None:
        return False
    if response.length is None or response.length > _SHORT_BYTES:
        return False
    sock.settimeout(_DRAIN_S)
    try:
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    sock.settimeout(None)
    return True


def _page_aligned(size_bytes: int) -> memoryview:
    """Return zeroed memory that begins at a page's beginning.

    The kernel copies between this memory and pages of the file. AMD's Zen 3 and 4 copy (`rep
    movsb`) at a third of the speed if the destination begins 1 to 31 bytes further into its page
    than the source does. Memory from malloc may cause this, as its large blocks begin 16 bytes into
    a page.
    """
    memory = memoryview(bytearray(size_bytes + mmap.PAGESIZE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    bytes_to_next_page = -address % mmap.PAGESIZE
    return memory[bytes_to_next_page : bytes_to_next_page + size_bytes]
