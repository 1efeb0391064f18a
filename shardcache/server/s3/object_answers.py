"""GetObject and HeadObject: bytes of an object, from the cache or as they arrive there.

`s3_endpoint` checks a request and calls `ObjectAnswers`. A selection (see `selections`) is the
bytes that a request asks for. Held bytes cannot be evicted from the cache as long as the block that
holds them lasts. The common headers are those that every answer of the endpoint has.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field

import structlog
from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.cache.objects.object_reads import HeldBytes
from shardcache.cache.objects.permitted_objects import Objects, count_upload_parts
from shardcache.cache.waiting.waits import JobKey
from shardcache.origin.objects import RemoteObject
from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.s3_requests import S3Request, check_conditions
from shardcache.server.s3.selections import (
    Selection,
    object_headers,
    select_range,
    select_span,
    stored_at_s,
)
from shardcache.server.s3.sending import ClientSocket, Sender, SlowClientError
from shardcache.shared.exceptions import OutdatedError, ShardcacheError, ShardChangedError

log = structlog.get_logger()

JOB = "s3"
"""Name of the job to which reads of S3 clients are charged; each user has a job of this name."""

# A body up to this size is sent in one message with its head; the kernel sends a longer one.
_SHORT_BYTES = 64 * 1024
# Ranges of an object that is not cached are fetched in pieces of this size, one ahead of the
# client.
_PIECE_BYTES = 8 * 1024 * 1024
_TRIES = 3  # number of attempts to answer a request whose object or cached file changes
_MAX_PARTS = 10_000  # number of parts of an upload that S3 allows


@dataclass(frozen=True, slots=True, eq=False)
class ObjectAnswers:
    """Answers requests for objects."""

    _objects: Objects
    _sender: Sender

    def select_known(
        self,
        request: S3Request,
        peer: Peer,
        common_headers: dict[str, str],
    ) -> Selection | None:
        """Return the bytes that a request selects; None if the object store has to be asked first.

        Raises S3Error, ShardcacheError.
        """
        if "partNumber" in request.params:
            return None  # the object store has to be asked for the part's size
        obj = self._objects.known(request.url, peer)
        if obj is None:
            return None
        selection = select_range(request, obj)
        selection.headers.update(common_headers)
        return selection

    def answer_from_memory(
        self,
        request: S3Request,
        peer: Peer,
        selection: Selection,
    ) -> web.Response | None:
        """Answer HeadObject, and GetObject for a few bytes that are in memory.

        Returns None if the body is long, or needs the object store or the disk. Raises
        ShardcacheError.
        """
        if request.signed.method == "HEAD":
            return _head(selection)
        if selection.size_bytes > _SHORT_BYTES:
            return None
        body = self._bytes_in_memory(selection)
        if body is None:
            return None
        return self._charge_and_answer(selection, (JOB, peer.uid), body)

    async def head(
        self,
        request: S3Request,
        peer: Peer,
        common_headers: dict[str, str],
    ) -> web.Response:
        """Answer HeadObject. Raises S3Error, ShardcacheError."""
        return _head(await self._find_selection(request, peer, common_headers))

    async def get(
        self,
        http: web.BaseRequest,
        request: S3Request,
        peer: Peer,
        common_headers: dict[str, str],
        selection: Selection | None,
    ) -> web.StreamResponse:
        """Answer GetObject. Raises S3Error, ShardcacheError.

        An error after the first bytes are sent is not raised: the connection is closed instead.

        Args:
            http: the request as aiohttp has it, to whose connection the answer is sent.
            request: the same request.
            peer: the user who signed it.
            common_headers: headers of every answer.
            selection: what `select_known` returned; None to find the selected bytes here.
        """
        # An attempt fails if the object or its cached file changes before the first byte is sent.
        # The next attempt begins with the object's present version.
        tries_left = _TRIES
        while True:
            tries_left -= 1
            if selection is None:
                selection = await self._find_selection(request, peer, common_headers)
            try:
                return await self._answer(http, selection, (JOB, peer.uid))
            except (OutdatedError, ShardChangedError):
                # `stat` returned a version that the object store no longer has.
                self._objects.forget(request.url)
                if not tries_left:
                    raise
            except _LostFileError:
                if not tries_left:
                    message = "the cached object was removed repeatedly while it was read"
                    raise S3Error("ServiceUnavailable", f"{message}; try again") from None
            selection = None

    async def _find_selection(
        self,
        request: S3Request,
        peer: Peer,
        common_headers: dict[str, str],
    ) -> Selection:
        """Return the bytes that a request selects. Raises S3Error, ShardcacheError."""
        obj = await self._objects.stat(request.url, peer)
        part_number = request.number("partNumber", lowest=1, highest=_MAX_PARTS)
        if part_number is None:
            selection = select_range(request, obj)
        else:
            selection = await self._select_upload_part(request, obj, part_number)
        selection.headers.update(common_headers)
        return selection

    async def _select_upload_part(
        self,
        request: S3Request,
        obj: RemoteObject,
        part_number: int,
    ) -> Selection:
        """Return the selection of a request for a part in which the object was uploaded.

        Raises S3Error, ShardcacheError.
        """
        check_conditions(request, obj.version, stored_at_s(obj))
        if request.header("range") is not None:
            raise S3Error("InvalidRequest", "ask for a range or for a part, not for both")
        span = await self._objects.part_span(obj, part_number)
        if span is None:
            raise S3Error("InvalidPartNumber", f"the object has no part {part_number}")
        headers = object_headers(request, obj)
        part_count = count_upload_parts(obj)
        if part_count is not None:
            headers["x-amz-mp-parts-count"] = str(part_count)
        if obj.size_bytes == 0:
            return select_span(obj, None, headers)  # Content-Range cannot name an empty range
        return select_span(obj, span, headers)

    async def _answer(
        self,
        http: web.BaseRequest,
        selection: Selection,
        job: JobKey,
    ) -> web.StreamResponse:
        """Send an answer with its body; close the connection if an error occurs midway.

        Raises ShardcacheError, OSError, SlowClientError and _LostFileError, but only before the
        first byte is sent.

        Args:
            job: the job to which the bytes are charged.
        """
        if selection.size_bytes <= _SHORT_BYTES:
            body = await self._read(selection, job)
            return self._charge_and_answer(selection, job, body)
        response = web.StreamResponse(status=selection.status, headers=selection.headers)
        response.content_length = selection.size_bytes
        try:
            await self._stream(http, response, selection, job)
        except (ShardcacheError, OSError, SlowClientError, _LostFileError) as exn:
            if not response.prepared:
                raise
            _cut_off(http, selection, exn)
        return response

    def _charge_and_answer(
        self,
        selection: Selection,
        job: JobKey,
        body: bytes | bytearray,
    ) -> web.Response:
        """Charge the bytes to a job; return the answer with its body."""
        self._objects.reads.count_sent(selection.obj, selection.size_bytes, job)
        return web.Response(status=selection.status, headers=selection.headers, body=body)

    async def _read(self, selection: Selection, job: JobKey) -> bytes | bytearray:
        """Return the selected bytes, once they are cached."""
        start, _ = selection.span
        async with self._objects.reads.hold_span(selection.obj, selection.span, job) as held:
            with _open(held) as fd:
                return await self._sender.read(fd, start, selection.size_bytes)

    def _bytes_in_memory(self, selection: Selection) -> bytearray | None:
        """Return the selected bytes if they are cached and in the page cache; None if not."""
        path = self._objects.reads.at_hand(selection.obj, selection.span)
        if path is None:
            return None
        start, _ = selection.span
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return self._sender.read_from_memory(fd, start, selection.size_bytes)
        finally:
            os.close(fd)

    async def _stream(
        self,
        http: web.BaseRequest,
        response: web.StreamResponse,
        selection: Selection,
        job: JobKey,
    ) -> None:
        """Send head and body; the kernel sends the body."""
        assert http.transport is not None
        with self._sender.client_socket(http.transport) as client:
            stream = _Stream(
                http,
                response,
                selection,
                client,
                self._objects.reads.is_space_wanted,
                is_whole=self._should_hold_whole(selection),
            )
            try:
                while not stream.is_at_end:
                    async with self._hold_next(stream, job) as held:
                        await stream.send(held)
                    if not stream.is_at_end:
                        # Wait without holding any bytes: the client may have stopped reading.
                        await client.wait_until_writable()
            finally:
                # The bytes are charged even if this task is cancelled: a client that has read
                # enough may close the connection.
                if response.prepared:
                    self._objects.reads.count_sent(selection.obj, client.sent_bytes, job)

    def _hold_next(
        self,
        stream: "_Stream",
        job: JobKey,
    ) -> AbstractAsyncContextManager[HeldBytes]:
        """Hold the bytes that are sent next: the whole object, or a piece of the object."""
        reads = self._objects.reads
        obj = stream.selection.obj
        if stream.is_whole:
            return reads.hold_whole(obj, job)

        _, end = stream.selection.span
        piece_end = min(end, stream.piece_end)
        # The piece after this one is named as well, so that it is fetched ahead of the client.
        next_piece = None
        if piece_end < end:
            next_piece = (piece_end, min(end, piece_end + _PIECE_BYTES))
        piece = (stream.sent_to, piece_end)
        return reads.hold_span(obj, piece, job, ahead=next_piece, in_order=True)

    def _should_hold_whole(self, selection: Selection) -> bool:
        """Return whether to hold the object as a whole while it is sent.

        It has to be selected as a whole, and to fit into the cache now. Otherwise it is sent in
        pieces: the request then needs space for one piece at a time, and does not wait for the
        space of the whole object.
        """
        is_all_selected = selection.size_bytes == selection.obj.size_bytes
        return is_all_selected and self._objects.reads.fits(selection.obj)


@dataclass(slots=True)
class _Stream:
    """A body that is being sent.

    Attributes:
        selection: the bytes of the body.
        is_whole: True while the object is held as a whole, False while it is sent in pieces.
        sent_to: offset in the object of the end of the bytes that were sent.
    """

    _http: web.BaseRequest
    _response: web.StreamResponse
    selection: Selection
    _client: ClientSocket
    _is_space_wanted: Callable[[], bool]  # returns True while others wait for cache space
    is_whole: bool
    sent_to: int = field(init=False)

    def __post_init__(self) -> None:
        self.sent_to, _ = self.selection.span

    @property
    def piece_end(self) -> int:
        """Offset in the object of the end of the piece that contains the next bytes.

        Pieces begin at the selection's start; the last one may end beyond the selection.
        """
        start, _ = self.selection.span
        sent_pieces = (self.sent_to - start) // _PIECE_BYTES
        return start + (sent_pieces + 1) * _PIECE_BYTES

    @property
    def is_at_end(self) -> bool:
        """True once everything was sent."""
        _, end = self.selection.span
        return self.sent_to >= end

    async def send(self, held: HeldBytes) -> None:
        """Send the held bytes. The bytes of a whole object are sent as they arrive.

        If the client reads nothing while others wait for cache space, only some of the held bytes
        are sent. The remaining bytes of a whole object are then sent in pieces.
        """
        with _open(held) as fd:
            if not self.is_whole:
                await self._send_ready(held, fd)
                return
            while not self.is_at_end:
                all_sent = await self._send_ready(held, fd)
                if not all_sent:
                    self.is_whole = False
                    return

    async def _send_ready(self, held: HeldBytes, fd: int) -> bool:
        """Wait until further bytes have arrived, and send them.

        Returns False if only some of these bytes were sent, because others wait for cache space.

        Args:
            fd: descriptor of the file with the held bytes.
        """
        arrived_to = await held.beyond(self.sent_to)
        _, selection_end = self.selection.span
        end = min(arrived_to, selection_end)
        if not self._response.prepared:
            # aiohttp sends the head. It has to be in the socket before the kernel sends the body.
            await self._response.prepare(self._http)
            await self._client.wait_until_flushed()
        self.sent_to = await self._client.send_file(fd, self.sent_to, end, self._is_space_wanted)
        return self.sent_to == end


def _head(selection: Selection) -> web.Response:
    """Return the answer to HeadObject."""
    headers = {**selection.headers, "Content-Length": str(selection.size_bytes)}
    return web.Response(status=selection.status, headers=headers)


class _LostFileError(Exception):
    """A file of the cache is missing: something other than the cache has removed it."""


@contextmanager
def _open(held: HeldBytes) -> Iterator[int]:
    """Open the file of held bytes during the block; yield its descriptor.

    If the file is missing or cannot be read, the cache is informed, so that it fetches the bytes
    again. Raises OSError; _LostFileError if the file is missing.
    """
    try:
        fd = os.open(held.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        held.note_lost()
        raise _LostFileError("the cached file was removed") from None
    try:
        yield fd
    except (ShardcacheError, ConnectionError):  # some are OSErrors, but none is about the file
        raise
    except OSError:  # the file cannot be read
        held.note_lost()
        raise
    finally:
        os.close(fd)


def _cut_off(http: web.BaseRequest, selection: Selection, exn: Exception) -> None:
    """Close the connection midway, so that the client notices that the body is incomplete."""
    if not isinstance(exn, ConnectionError):
        cause = str(exn)
        if isinstance(exn, SlowClientError):
            cause = "the client did not read for too long"
        log.warning(
            "cannot finish the answer to an S3 client; closing the connection",
            url=selection.obj.url,
            cause=cause,
        )
    if http.transport is not None:
        http.transport.abort()
