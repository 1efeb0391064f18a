"""Beginning and end of a reader's session over a WebSocket: hello, welcome, or a refusal.

`app` calls `handle_session` for each WebSocket. The client's first message is `hello`, and the
daemon answers it with `welcome`. From then on, `ReaderSession` answers the reader's requests.
"""

import asyncio
from contextlib import suppress

import structlog
from aiohttp import WSMsgType, web

from shardcache import __version__
from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.cache.readers.jobs import Job, Loader
from shardcache.server.peer import peer_of
from shardcache.server.reader_session import ReaderSession
from shardcache.server.service import SERVICE, Service
from shardcache.shared import protocol, versions
from shardcache.shared.exceptions import ProtocolError, ShardcacheError
from shardcache.shared.protocol import REQUESTS, Json, take
from shardcache.shared.units import user_name
from shardcache.telemetry.logs import about

log = structlog.get_logger()

# Time within which a client has to send its hello. A reader sends it immediately; a client that
# sends none would hold its connection indefinitely.
_HELLO_S = 10.0
# Time to wait for the client's part of the close handshake. A reader that is busy with a shard does
# not answer it in time; its next request fails instead.
_CLOSE_S = 1.0


async def handle_session(request: web.Request) -> web.WebSocketResponse:
    """Serve one session until either side closes it."""
    service = request.app[SERVICE]
    peer = peer_of(request)
    sessions = service.drain.sessions
    service.limits().check_sessions(len(sessions))
    socket = web.WebSocketResponse(
        timeout=_CLOSE_S,
        max_msg_size=protocol.MAX_REQUEST_BYTES,
        compress=False,
    )
    await socket.prepare(request)
    sessions.add(socket)
    try:
        await _serve(socket, service, peer)
    except ShardcacheError as exn:
        service.audit.note("session refused", peer.uid, cause=exn.message)
        refusal = {"type": "error", "id": None, "error": exn.to_json()}
        with suppress(ConnectionError):
            await socket.send_str(protocol.written(refusal).decode())
        await socket.close()
    finally:
        sessions.discard(socket)
    return socket


async def _serve(socket: web.WebSocketResponse, service: Service, peer: Peer) -> None:
    """Serve a reader from its hello to its end; its plan and leases end with the session.

    Raises ShardcacheError if the reader's hello is malformed, or the reader may not have a session.
    """
    hello = await _receive_hello(socket)
    protocol_version = versions.agree(
        daemon=versions.Release(__version__, versions.SPOKEN),
        client=versions.Release.of(hello),
    )
    # The fields are checked only now: another protocol version may have other fields.
    REQUESTS["hello"].check(hello)

    credentials = service.cache.session_credentials.held(hello.get("credentials", {}), peer.uid)
    with credentials, about(job=hello["job"], uid=peer.uid):
        # The user's name is looked up now and remembered. A directory server may be slow, and
        # status pages must not wait for it.
        await asyncio.to_thread(user_name, peer.uid)
        reader = service.cache.readers.add(hello["job"], peer.uid, _loader(hello))
        logged = {name: hello[name] for name in ("rank", "worker", "pid") if name in hello}
        log.debug("reader connected", **logged)
        try:
            await _send_welcome(socket, protocol_version, service.cache)
            await ReaderSession(socket, service, reader, peer, hello).run()
        finally:
            await reader.close()
            log.debug("reader disconnected", **logged)
            _log_bill_of_idle_job(reader.job, service.cache)


async def _receive_hello(socket: web.WebSocketResponse) -> Json:
    """Return a session's first message, unchecked except for its type. Raises ProtocolError."""
    try:
        first = await socket.receive(_HELLO_S)
    except (TimeoutError, ConnectionError):
        raise ProtocolError(f"no 'hello' within {_HELLO_S:g} s") from None
    if first.type is WSMsgType.TEXT:
        hello = protocol.parse(first.data)
        if hello.get("type") == "hello":
            return hello
    raise ProtocolError("a session must begin with 'hello'")


def _loader(hello: Json) -> Loader | None:
    """Return the DataLoader whose worker the reader is; None if the reader is no worker.

    Raises ProtocolError.
    """
    if "loader" not in hello:
        return None
    return Loader(
        take(hello, "loader", str),
        take(hello, "rank", int),
        take(hello, "batch_size", int),
    )


async def _send_welcome(socket: web.WebSocketResponse, protocol_version: int, cache: Cache) -> None:
    """Send the answer to a hello.

    Args:
        protocol_version: the version that both sides use from now on.
    """
    welcome = {
        "type": "welcome",
        "protocol": protocol_version,
        "version": __version__,
        "cache_dir": str(cache.layout.root),
        "bundles": True,
        "range_plans": True,
    }
    with suppress(ConnectionError):
        await socket.send_str(protocol.written(welcome).decode())


def _log_bill_of_idle_job(job: Job, cache: Cache) -> None:
    """Log what a job has fetched and read, once its last reader has disconnected."""
    if job.shards_done and not job.sessions:
        bill = cache.bills.to_json(job.key)
        log.info("the job's last reader has disconnected", bill=bill["text"])
