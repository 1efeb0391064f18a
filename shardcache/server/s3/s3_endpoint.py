"""The S3 endpoint: requests of S3 clients on this node, answered from the cache.

The endpoint is read-only. Each request is signed with a key that the daemon gave to a user; this
user's access rules apply, as at the Unix socket. `serving` creates one `S3Endpoint` for the daemon.
It finds the user and the operation. `object_answers` then answers requests for objects, and
`bucket_answers` all others. A peer is the user who signed a request. The common headers are those
that every answer of the endpoint has.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from aiohttp import web

from shardcache.access.rules import Peer
from shardcache.cache.facade import Cache
from shardcache.server.process.drain import Drain
from shardcache.server.s3.bucket_answers import BucketAnswers
from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.object_answers import ObjectAnswers
from shardcache.server.s3.s3_requests import S3Request
from shardcache.server.s3.selections import Selection
from shardcache.server.s3.sending import Sender, SlowClientError
from shardcache.server.s3.signatures import Signature
from shardcache.server.s3.user_keys import S3Keys
from shardcache.shared.exceptions import NotFoundError, ShardcacheError
from shardcache.shared.own_endpoint import (
    DAEMON_AGENT,
    ENDPOINT_HEADER,
    OWN_ENDPOINT,
    OWN_ENDPOINT_REMEDY,
)

log = structlog.get_logger()

# Maximum number of requests that are answered at the same time. Each may have three open files.
_MAX_REQUESTS = 1024
_MAX_USER_REQUESTS = _MAX_REQUESTS // 2  # for each user, so that one cannot shut out the others
_READ_METHODS = ("GET", "HEAD")
_SHOWN_CHARS = 40  # number of characters of an unknown parameter that an error shows
# Every request of a browser has at least one of these headers, and no page can remove them.
_BROWSER_HEADERS = frozenset({"origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest"})

# Parameters of the queries that the endpoint answers, in lower case.
_OBJECT_PARAMS = frozenset({"partnumber"})
_LISTING_PARAMS = frozenset(
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
# Parameters that any request may have. SDKs add `x-id`, which names the operation, for their logs.
_COMMON_PARAMS = frozenset({"x-id"})
_COMMON_PREFIXES = ("x-amz-", "response-")


class S3Endpoint:
    """Answers the requests of S3 clients."""

    def __init__(self, cache: Cache, keys: S3Keys, drain: Drain, sender: Sender) -> None:
        self._counters = cache.counters
        self._keys = keys
        self._drain = drain
        self._objects = ObjectAnswers(cache.objects, sender)
        self._buckets = BucketAnswers(cache.objects)
        self._running: Counter[int] = Counter()  # number of running requests by user id

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Raises ConnectionError to end the connection, and nothing else."""
        self._counters.s3_requests += 1
        # The id of a request is a plain number. It need not be secret, and random numbers would
        # take noticeable time at 5,000 requests a second.
        common_headers = {
            "x-amz-request-id": f"{self._counters.s3_requests:016X}",
            ENDPOINT_HEADER: "1",
        }
        try:
            return await self._answer(http, common_headers)
        except S3Error as exn:
            error = exn
        except ShardcacheError as exn:
            error = S3Error.of(exn)
        except ConnectionError:
            raise
        except SlowClientError:
            raise ConnectionResetError("the client reads nothing") from None
        except OSError as exn:  # an error of the disk, or the process has no descriptors left
            reason = exn.strerror or exn
            error = S3Error("ServiceUnavailable", f"the daemon cannot answer: {reason}")
        except Exception:  # a top-level guard, as for other requests
            log.exception("unexpected error in an S3 request", path=http.path)
            error = S3Error("InternalError", "a fault of the daemon; see its log")
        return _refusal(http, error, common_headers)

    async def _answer(
        self,
        http: web.BaseRequest,
        common_headers: dict[str, str],
    ) -> web.StreamResponse:
        """Answer one request. Raises any error."""
        headers = _joined_headers(http)
        _refuse_browsers_and_daemons(headers)
        request = S3Request.parse(http.method, http.raw_path, headers)
        peer = self._authenticate(request)
        if http.method not in _READ_METHODS:
            raise S3Error(
                "MethodNotAllowed",
                "the endpoint is read-only; write to the object store itself",
                {"Allow": ", ".join(_READ_METHODS)},
            )
        selection = None
        if request.key and not self._drain.has_begun:  # else `running_request` refuses it
            _check_params(request, _OBJECT_PARAMS)
            selection = self._objects.select_known(request, peer, common_headers)
            if selection is not None:
                # An instant answer is not counted as running: nothing else runs before it is
                # returned.
                instant = self._objects.answer_from_memory(request, peer, selection)
                if instant is not None:
                    return instant
        with self._admitted(peer), self._drain.running_request():
            if request.key:
                return await self._answer_object(http, request, peer, common_headers, selection)
            response = await self._answer_bucket(request, peer)
            response.headers.update(common_headers)
            return response

    def _authenticate(self, request: S3Request) -> Peer:
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
        """Count a request as running during the block.

        Raises S3Error if too many requests are running. For root and the daemon's own user, only
        the limit for all users applies.
        """
        if self._running.total() >= _MAX_REQUESTS:
            raise S3Error("SlowDown", f"the daemon answers {_MAX_REQUESTS} requests, its maximum")
        if not peer.is_trusted and self._running[peer.uid] >= _MAX_USER_REQUESTS:
            raise S3Error("SlowDown", f"{_MAX_USER_REQUESTS} requests of yours are being answered")
        self._running[peer.uid] += 1
        try:
            yield
        finally:
            self._running[peer.uid] -= 1
            if not self._running[peer.uid]:
                del self._running[peer.uid]

    async def _answer_object(
        self,
        http: web.BaseRequest,
        request: S3Request,
        peer: Peer,
        common_headers: dict[str, str],
        selection: Selection | None,
    ) -> web.StreamResponse:
        """Answer GetObject and HeadObject. Raises any error.

        Args:
            http: the request as aiohttp has it.
            request: the same request.
            peer: the user who signed it.
            common_headers: headers of every answer.
            selection: the requested bytes; None if the object store has to be asked first.
        """
        try:
            if http.method == "HEAD":
                return await self._objects.head(request, peer, common_headers)
            return await self._objects.get(http, request, peer, common_headers, selection)
        except NotFoundError:
            # The answer to HEAD has no body, so it cannot say whether the bucket is missing.
            if http.method == "GET" and not await self._buckets.is_readable(request, peer):
                raise S3Error("NoSuchBucket", f"there is no bucket {request.bucket}") from None
            raise S3Error("NoSuchKey", "the object store has no such object") from None

    async def _answer_bucket(self, request: S3Request, peer: Peer) -> web.Response:
        """Answer a request for a bucket's name, region or listing, or for all buckets."""
        if not request.bucket:
            _check_params(request, frozenset())
            return await self._buckets.list_buckets(peer)
        if request.signed.method == "HEAD":
            return await self._buckets.head(request, peer)
        if "location" in request.params:
            return await self._buckets.location(request, peer)
        _check_params(request, _LISTING_PARAMS)
        if request.params.get("list-type") == "2":
            return await self._buckets.list_v2(request, peer)
        return await self._buckets.list_v1(request, peer)


def _joined_headers(http: web.BaseRequest) -> dict[str, str]:
    """Return a request's headers by name in lower case; repeated headers are joined by commas."""
    headers: dict[str, str] = {}
    for name, value in http.headers.items():
        lower = name.lower()
        headers[lower] = f"{headers[lower]},{value}" if lower in headers else value
    return headers


def _refuse_browsers_and_daemons(headers: dict[str, str]) -> None:
    """Raise S3Error for requests of web pages and of daemons.

    If a daemon had this endpoint as its object store, it would send requests to itself; another
    daemon would cache everything a second time.
    """
    if not _BROWSER_HEADERS.isdisjoint(headers):
        raise S3Error("AccessDenied", "the endpoint is for programs, not for web pages")
    if DAEMON_AGENT in headers.get("user-agent", ""):
        raise S3Error("InvalidRequest", f"{OWN_ENDPOINT}; {OWN_ENDPOINT_REMEDY}")


def _check_params(request: S3Request, permitted: frozenset[str]) -> None:
    """Raise S3Error for parameters that the endpoint does not support.

    They must not be ignored, as a parameter may select another operation: `?acl`, for example, asks
    for an object's ACL.

    Args:
        permitted: parameters of this operation, in lower case.
    """
    for name in request.params:
        lower = name.lower()
        is_common = lower in _COMMON_PARAMS or lower.startswith(_COMMON_PREFIXES)
        if not is_common and lower not in permitted:
            raise S3Error(
                "NotImplemented",
                f"{name[:_SHOWN_CHARS]!a} is not supported here; send the request to the object "
                "store",
            )


def _refusal(http: web.BaseRequest, error: S3Error, common_headers: dict[str, str]) -> web.Response:
    """Return the answer that refuses a request."""
    body = b""
    has_body = http.method != "HEAD" and error.status != 304
    if has_body:
        body = error.document(http.path, common_headers["x-amz-request-id"])
    response = web.Response(
        status=error.status,
        headers={**common_headers, **error.headers, "Content-Type": "application/xml"},
        body=body,
    )
    if error.code in ("SlowDown", "ServiceUnavailable"):
        response.headers["Retry-After"] = "1"
    if http.method not in _READ_METHODS:
        # The request's body may still arrive. On an open connection, it would be parsed as the next
        # request.
        response.force_close()
    return response
