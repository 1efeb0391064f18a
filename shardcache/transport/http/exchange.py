"""One HTTP request and its answer, whose body is written to a file."""

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

# Answers of a server that is busy: they hold for any request, not only for the one sent ahead.
_BUSY = {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
# An unwanted body is read to its end if a new connection would cost more.
_SHORT_BYTES = 64 * 1024
_DRAIN_S = 1.0
# Bytes read, summed and written at a time, at most: for each call the interpreter's lock is handed
# over.
_BLOCK_BYTES = 1024 * 1024

_memory = threading.local()  # each thread has a block, which all of its bodies pass through

AnyReader: TypeAlias = BodyReader | ChunksReader


class StaleError(Exception):
    """A reused connection is closed or silent, or a primed one brings an unexpected answer."""


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request and its answer. Runs in a thread of its own; blocks.

    Args:
        _report_held: called when a held body has arrived.
        _report_progress: called when the body begins and when its byte credit is used up.

    Attributes:
        prompt: True to report progress for every MiB that is written, too.
    """

    _request: Request
    _body: Body | None
    _gate: Gate
    _report_held: Callable[[], None]
    _report_progress: Callable[[], None]
    prompt: bool = field(default=False, kw_only=True)

    def run(self, pool: Pool) -> Answer:
        """Return the answer; its body is in the file if the answer is as expected.

        Raises OSError and http.client.HTTPException if the connection fails or the answer is not
        HTTP; NearHostError, PartFileError, CancelledError.
        """
        self._gate.ready(1)  # the request may have been paused before it begins
        # 1. Over the connection on which this request was sent ahead.
        # 2. Over an idle one.
        for take in (self._take_primed, self._take_idle):
            try:
                connection = take(pool)
                if connection is not None:
                    return self._ask(pool, connection)
            except StaleError:
                self._gate.check()

        # 3. Over a new one.
        try:
            connection = open_connection(server_of(self._request), self._gate)
        except ProxyError as exn:
            if exn.status == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
                return Answer(exn.status, {})  # as without a tunnel
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
        """Return the answer over a connection, which is kept or closed."""
        is_reusable = False
        was_primed = connection.is_primed
        try:
            with (
                self._gate.cancellable(connection.end_reads),
                # The response is closed, else it keeps the socket open.
                closing(self._response(pool, connection)) as response,
            ):
                headers = response.head
                sums = None
                if self._body is not None and _is_expected(self._body, response, headers):
                    sums, is_whole = self._write(self._body, response, connection.socket)
                elif was_primed and response.status not in _BUSY:
                    raise StaleError
                else:
                    is_whole = _drain(response, headers, connection.socket)
                is_reusable = is_whole and not response.will_close
        finally:
            if is_reusable:
                pool.keep(server_of(self._request), connection)
            else:
                connection.close()

        if sums:
            # Of an expected answer, one header is needed; there are a hundred such answers per GB.
            headers = {name: headers[name] for name in KEPT_HEADERS & headers.keys()}
        return Answer(response.status, headers, sums)

    # The head of the answer

    def _response(self, pool: Pool, connection: HttpConnection) -> Response:
        """Send the request and read the answer's head.

        Raises StaleError if a reused connection fails.
        """
        was_used_before = connection.heard_s is not None
        if was_used_before:
            return self._response_over_idle(pool, connection)
        was_primed = connection.is_primed
        try:
            return self._head(connection, None)
        except (OSError, http.client.HTTPException) as exn:
            if was_primed:
                raise StaleError from exn
            raise

    def _response_over_idle(self, pool: Pool, connection: HttpConnection) -> Response:
        """As `_response`, over a connection that has been idle: it may be dead, without a word."""
        asked_s = time.monotonic()
        patience_s = pool.patience_s
        if self._request.via is None:
            self._gate.asked_idle_s = asked_s
        else:
            # No network in between drops idle connections, and the tier may answer late.
            patience_s = None
        try:
            response = self._head(connection, patience_s)
        except OSError as exn:
            if isinstance(exn, TimeoutError):
                pool.record_silence(asked_s)
            raise StaleError from exn
        self._gate.asked_idle_s = None
        pool.record_answer()
        return response

    def _head(self, connection: HttpConnection, patience_s: float | None) -> Response:
        """Send the request, unless it was sent ahead, and read the answer's head.

        Args:
            patience_s: longest silence of the server before the head; None for any.
        """
        response = Response(connection.socket, self._request.method)
        try:
            wait_without_limit(connection.socket)
            if not connection.is_primed:
                connection.socket.sendall(request_head(self._request))
            connection.is_primed = False
            connection.socket.settimeout(patience_s)
            response.receive()
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
        """Write the body.

        Returns its checksums, and whether the connection is at the answer's end. A chunked body
        that is longer than expected is not written and has no checksums.
        """
        if body.held or response.chunked:
            return self._write_at_once(body, response, sock)
        read = BodyReader(response, sock)
        with writing(body.parts) as writer:
            self._copy(body.parts.size_bytes, read, writer)
        return writer.finished, not read.has_more

    def _write_at_once(
        self,
        body: Body,
        response: Response,
        sock: socket.socket,
    ) -> tuple[list[PartSums] | None, bool]:
        """As `_write`, once all of the body has arrived in memory."""
        memory = _page_aligned(body.parts.size_bytes)
        read = ChunksReader(response) if response.chunked else BodyReader(response, sock)
        filled_bytes = 0
        while filled_bytes < len(memory):
            filled_bytes += self._receive(memory[filled_bytes:], read)
        if response.chunked and read.has_more:
            return None, False
        if body.held:
            self._report_held()
            self._gate.wait_for_commit()
        with self._gate.writing():
            return write_parts(body.parts, memory), not read.has_more

    def _copy(self, size_bytes: int, read: AnyReader, writer: PartsWriter) -> None:
        """Write a body block by block."""
        if not hasattr(_memory, "block"):
            _memory.block = _page_aligned(_BLOCK_BYTES + mmap.PAGESIZE)
        gate = self._gate
        while gate.written_bytes < size_bytes:
            at = gate.written_bytes
            wanted_bytes = min(_BLOCK_BYTES, size_bytes - at)
            # The block begins at the same place of a page as the bytes in the file.
            block = _memory.block[at % mmap.PAGESIZE :][:wanted_bytes]
            count = self._receive(block, read)
            with gate.writing():
                writer.write(block[:count])
            gate.written_bytes += count

            crosses_mib = (at + count) // _BLOCK_BYTES > at // _BLOCK_BYTES
            if self.prompt and crosses_mib:
                self._report_progress()

    def _receive(self, memory: memoryview, read: AnyReader) -> int:
        """Fill some or all of the memory and return the number of bytes."""
        count = read(memory[: self._gate.ready(len(memory))])
        if not count:
            message = "the server closed the connection before the end of the body"
            raise ConnectionResetError(message)
        if self._gate.receive(count):
            self._report_progress()
        return count


def _is_expected(body: Body, response: Response, headers: dict[str, str]) -> bool:
    """Return whether an answer's body is to be written."""
    if response.status != body.status:
        return False
    if not _has_right_size(body, response, headers):
        return False
    return all(headers.get(name) in values for name, values in body.expected.items())


def _has_right_size(body: Body, response: Response, headers: dict[str, str]) -> bool:
    """Return whether the size is the expected one, or a chunked body may turn out to have it."""
    size_bytes = body.parts.size_bytes
    if not response.chunked:
        return headers.get("content-length") == str(size_bytes)
    # A chunked body is written only after all of it has arrived: it is in memory until then.
    if size_bytes > body.parts.part_bytes:
        return False
    return body.encoded_chunks or headers.get("content-encoding", "identity") == "identity"


def _drain(response: Response, headers: dict[str, str], sock: socket.socket) -> bool:
    """Read a short unwanted body, such as an error's; return whether its end was reached."""
    is_length_invalid = number_in(headers.get("content-length", "0")) is None
    if is_length_invalid or response.length is None or response.length > _SHORT_BYTES:
        return False
    sock.settimeout(_DRAIN_S)
    try:
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    sock.settimeout(None)
    return True


def _page_aligned(size_bytes: int) -> memoryview:
    """Return zeroed memory that does not begin 16 bytes into a page, as malloc's does.

    AMD's Zen 3 and 4 copy (`rep movsb`) at a third of the speed if the destination lies 1 to 31
    bytes further into its page than the source does.
    """
    memory = memoryview(bytearray(size_bytes + mmap.PAGESIZE))
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % mmap.PAGESIZE
    return memory[start : start + size_bytes]
