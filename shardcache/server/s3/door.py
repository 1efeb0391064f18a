"""The S3 endpoint: requests of S3 clients on this node, answered from the cache.

It only reads. Each request is signed with a key that the daemon gave to a user, whose rules of
access apply as at the Unix socket.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.errors import NotFoundError, ShardcacheError
from shardcache.server.process.drain import Drain
from shardcache.server.s3.bucket_answers import BucketAnswers
from shardcache.server.s3.keys import S3Keys
from shardcache.server.s3.object_answers import ObjectAnswers
from shardcache.server.s3.requests import S3Request
from shardcache.server.s3.s3_errors import S3Error
from shardcache.server.s3.sending import Sender, SlowClientError
from shardcache.server.s3.signatures import Signature
from shardcache.shared.own_endpoint import (
    DAEMON_AGENT,
    ENDPOINT_HEADER,
    OWN_ENDPOINT,
    OWN_ENDPOINT_REMEDY,
)

log = structlog.get_logger()

# Requests that are answered at a time; each may have three open files. One user may have half.
_MAX_REQUESTS = 1024
_READ_ONLY = "GET, HEAD"
# Headers of which a browser's request has one at least, and which no page can leave out.
_OF_BROWSERS = frozenset({"origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"})

# Parameters of the operations that are answered here.
_OF_OBJECTS = frozenset({"partnumber", "versionid"})
_OF_LISTINGS = frozenset(
    {
        "list-type",
        "prefix",
        "delimiter",
        "max-keys",
        "continuation-token",
        "start-after",
        "marker",
        "encoding-type",
        "fetch-owner",
    }
)
_ANYWHERE = frozenset({"x-id"})  # which SDKs add for their logs
_ANYWHERE_PREFIXES = ("x-amz-", "response-")


class S3Door:
    """Answers the requests of S3 clients."""

    def __init__(self, cache: Cache, keys: S3Keys, drain: Drain, sender: Sender) -> None:
        self._counters = cache.counters
        self._keys = keys
        self._drain = drain
        self._objects = ObjectAnswers(cache.objects, sender)
        self._buckets = BucketAnswers(cache.objects)
        self._running: Counter[int] = Counter()  # requests, by user

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; never raises anything but what ends the connection."""
        self._counters.s3_requests += 1
        # A plain number: nobody trusts it, and random ones would cost time at 5,000 a second.
        headers = {
            "x-amz-request-id": f"{self._counters.s3_requests:016X}",
            ENDPOINT_HEADER: "1",
        }
        try:
            return await self._answer(http, headers)
        except S3Error as exn:
            error = exn
        except ShardcacheError as exn:
            error = S3Error.of(exn)
        except ConnectionError:
            raise
        except SlowClientError:
            raise ConnectionResetError("the client reads nothing") from None
        except OSError as exn:  # of the disk, or the process's own
            error = S3Error("ServiceUnavailable", f"the daemon cannot answer: {exn.strerror}")
        except Exception:  # a top-level guard, as of other requests
            log.exception("unexpected error in an S3 request", path=http.path)
            error = S3Error("InternalError", "a fault of the daemon; see its log")
        return _refusal(http, error, headers)

    async def _answer(self, http: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        fields = _fields(http)
        _check_origin(fields)
        request = S3Request.of(http.method, http.raw_path, fields)
        peer = self._peer(request)
        if http.method not in ("GET", "HEAD"):
            raise S3Error(
                "MethodNotAllowed",
                "the endpoint is read-only; write to the object store itself",
                {"Allow": _READ_ONLY},
            )
        response = self._at_once(request, peer, headers)
        if response is not None:
            return response
        with self._admitted(peer), self._drain.errand():
            if request.key:
                return await self._of_object(http, request, peer, headers)
            response = await self._of_bucket(request, peer)
            response.headers.update(headers)
            return response

    def _at_once(
        self,
        request: S3Request,
        peer: Peer,
        headers: dict[str, str],
    ) -> web.Response | None:
        """Return the answer to a request that needs no waiting; None for all others.

        It is not counted: while it is made, no other request is answered.
        """
        if request.signed.method != "GET" or not request.key or self._drain.began:
            return None
        _check_of_object(request)
        return self._objects.at_once(request, peer, headers)

    def _peer(self, request: S3Request) -> Peer:
        """Return the user who signed a request. Raises S3Error."""
        signature = Signature.of(request.signed)
        key = self._keys.get(signature.access_key)
        if key is None:
            raise S3Error(
                "InvalidAccessKeyId",
                "this daemon did not issue the key; run shardcache credentials",
            )
        now_s = time.time()
        signature.check(request.signed, key.secret_key, now_s)
        if signature.token:
            raise S3Error("InvalidToken", "keys of this daemon have no session token; omit it")
        if now_s >= key.expires_s:
            raise S3Error("ExpiredToken", "the key has expired; run shardcache credentials again")
        return key.peer

    @contextmanager
    def _admitted(self, peer: Peer) -> Iterator[None]:
        """Count a request while it is answered. Raises S3Error if there are too many."""
        is_limited = peer.uid not in (0, os.getuid())
        if self._running.total() >= _MAX_REQUESTS:
            raise S3Error("SlowDown", f"the daemon answers {_MAX_REQUESTS} requests, its maximum")
        if is_limited and self._running[peer.uid] >= _MAX_REQUESTS // 2:
            raise S3Error("SlowDown", f"{_MAX_REQUESTS // 2} requests of yours are being answered")
        self._running[peer.uid] += 1
        try:
            yield
        finally:
            self._running[peer.uid] -= 1
            if not self._running[peer.uid]:
                del self._running[peer.uid]

    async def _of_object(
        self,
        http: web.BaseRequest,
        request: S3Request,
        peer: Peer,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        _check_of_object(request)
        try:
            if http.method == "HEAD":
                response = await self._objects.head(request, peer)
                response.headers.update(headers)
                return response
            return await self._objects.get(http, request, peer, headers)
        except NotFoundError:
            if http.method == "GET" and not await self._buckets.exists(request, peer):
                raise S3Error("NoSuchBucket", f"there is no bucket {request.bucket}") from None
            raise S3Error("NoSuchKey", "the object store has no such object") from None

    async def _of_bucket(self, request: S3Request, peer: Peer) -> web.Response:
        method = request.signed.method
        if not request.bucket:
            _check_operation(request, frozenset())
            return await self._buckets.buckets(peer)
        if method == "HEAD":
            return await self._buckets.head(request, peer)
        if "location" in request.params:
            return await self._buckets.location(request, peer)
        _check_operation(request, _OF_LISTINGS)
        if request.params.get("list-type") == "2":
            return await self._buckets.list_v2(request, peer)
        return await self._buckets.list_v1(request, peer)


def _fields(http: web.BaseRequest) -> dict[str, str]:
    """Return the headers by name in lower case, repeated ones joined."""
    fields: dict[str, str] = {}
    for name, value in http.headers.items():
        name = name.lower()
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    return fields


def _check_origin(fields: dict[str, str]) -> None:
    """Raise S3Error for requests of web pages and of daemons.

    A daemon that took an endpoint for the object store would ask itself, or keep all twice.
    """
    if not _OF_BROWSERS.isdisjoint(fields):
        raise S3Error("AccessDenied", "the endpoint is for programs, not for web pages")
    if DAEMON_AGENT in fields.get("user-agent", ""):
        raise S3Error("InvalidRequest", f"{OWN_ENDPOINT}; {OWN_ENDPOINT_REMEDY}")


def _check_of_object(request: S3Request) -> None:
    """Raise S3Error for a query that is not of GetObject and HeadObject."""
    _check_operation(request, _OF_OBJECTS)
    if request.params.get("versionId", "null") != "null":
        raise S3Error("NotImplemented", "only the present version is served; omit versionId")


def _check_operation(request: S3Request, known: frozenset[str]) -> None:
    """Raise S3Error for a query that belongs to another operation."""
    for name in request.params:
        lower = name.lower()
        if lower in known or lower in _ANYWHERE or lower.startswith(_ANYWHERE_PREFIXES):
            continue
        raise S3Error(
            "NotImplemented",
            f"{name[:40]!a} is not supported here; send the request to the object store",
        )


def _refusal(http: web.BaseRequest, error: S3Error, headers: dict[str, str]) -> web.Response:
    body = b""
    if http.method != "HEAD" and error.status != 304:
        body = error.document(http.path, headers["x-amz-request-id"])
    response = web.Response(
        status=error.status,
        headers={**headers, **error.headers, "Content-Type": "application/xml"},
        body=body,
    )
    if error.code in ("SlowDown", "ServiceUnavailable"):
        response.headers["Retry-After"] = "1"
    if http.method not in ("GET", "HEAD"):
        # Its body may still come, or not: the next request could not be told from it.
        response.force_close()
    return response
