"""The S3 SDK, s3fs on aiobotocore: its sessions, its connections, and the translation of its errors."""

import asyncio
import math
import os
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import aiobotocore.session
import aiohttp
from aiobotocore.httpsession import AIOHTTPSession
from aiohttp.http_exceptions import LineTooLong
from botocore import exceptions as boto
from botocore.loaders import Loader, create_loader
from botocore.parsers import ResponseParserError
from s3fs import S3FileSystem

from shardcache import errors
from shardcache.config import OriginTable
from shardcache.origin.credential_process import resolver_of
from shardcache.origin.http_semantics import certificate_error, connection_error, error_of
from shardcache.transport.connections import IDLE_S, SILENCE_S, failure, new_socket
from shardcache.transport.messages import HEAD_REMEDY, MAX_HEAD_BYTES, HeadError

CONNECT_TIMEOUT_S = 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REGION = "x-amz-bucket-region"
_CONNECTOR = {"keepalive_timeout": IDLE_S, "socket_factory": new_socket}

E = TypeVar("E", bound=Exception)

# Raised for an answer with a missing or unreadable field.
_NONSENSE = (ResponseParserError, KeyError, ValueError)
# Raised by botocore when credentials are still expired after a refresh.
_STILL_EXPIRED = RuntimeError
# Everything that an s3fs call or the parsing of its answer may raise; s3fs turns S3's refusals into OSErrors.
FOREIGN = (boto.BotoCoreError, boto.ClientError, aiohttp.ClientError, OSError, *_NONSENSE, _STILL_EXPIRED)

# botocore errors that are not the request's fault.
_CONNECTION = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError)

_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_REFUSED = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "RequestTimeTooSkewed"})
_BUSY = frozenset(
    {"SlowDown", "SlowDownRead", "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequests"}
)
_TRANSIENT = frozenset({"RequestTimeout", "InternalError"})
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.SSOError,
    boto.UnauthorizedSSOTokenError,
    boto.TokenRetrievalError,
    boto.RefreshWithMFAUnsupportedError,
)
_DENIED = (
    "allow the daemon's credentials s3:GetObject and s3:ListBucket on this bucket; or give it others (AWS_PROFILE, or "
    "`profile` in an [[origin]] table), or `anon = true` for public data"
)


@dataclass(slots=True, eq=False)
class _OpenSession:
    fs: S3FileSystem
    client: Any
    users: int = 0
    retired: bool = False


class SdkSessions:
    """Provides the current filesystem, and closes retired ones when their last user is done.

    botocore renews the credentials of roles and tokens by itself. Those that it reads only once, such as keys in a
    file, are read again by a new session after the origin has refused the old ones.

    Args:
        attempts: attempts of each request by the SDK itself.
        read_timeout_s: silence after which a request has failed; None if the caller notices it.
    """

    def __init__(
        self, table: OriginTable, max_connections: int, *, attempts: int = 1, read_timeout_s: float | None = None
    ) -> None:
        self._options = _options(table, max_connections, read_timeout_s)
        self._attempts = attempts
        self._profile = self._options.pop("profile", table.profile)
        self._starting = asyncio.Lock()
        self._present: _OpenSession | None = None

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[S3FileSystem]:
        """Provide the filesystem for one request, and translate every foreign exception of the block."""
        session: _OpenSession | None = None
        try:
            session = await self._borrow()
            yield session.fs
        except errors.ShardcacheError as exn:  # NotFoundError is also an OSError
            exn.url = exn.url or url
            raise
        except FOREIGN as exn:
            error, is_stale = judge(exn, url)
            if is_stale and session is self._present:
                self._retire()
            raise error from exn
        finally:
            if session is not None:
                await self._give_back(session)

    async def close(self) -> None:
        """Close the current session as soon as it is unused."""
        session = self._present
        if session is not None:
            self._retire()
            session.users += 1
            await self._give_back(session)

    async def _borrow(self) -> _OpenSession:
        async with self._starting:
            session = self._present
            if session is None:
                region = self._options["client_kwargs"].get("region_name")
                boto_session = await asyncio.to_thread(_boto_session, self._profile, region)
                fs = S3FileSystem(session=boto_session, **self._options)
                fs.retries = self._attempts
                client = await fs.set_session()
                for operation in ("GetObject", "HeadObject"):
                    client.meta.events.register_first(f"choose-signer.s3.{operation}", keep_signature_v4)
                session = self._present = _OpenSession(fs, client)
        session.users += 1
        return session

    async def _give_back(self, session: _OpenSession) -> None:
        session.users -= 1
        if session.retired and not session.users:
            await session.client.close()

    def _retire(self) -> None:
        if self._present is not None:
            self._present.retired = True
            self._present = None


_describing = threading.Lock()


def descriptions() -> Loader:
    """Return botocore's descriptions of S3, loaded once for all sessions. Blocks for some 0.3 s the first time."""
    with _describing:  # else two threads that need them at the same time would both load them
        return _descriptions()


@cache
def _descriptions() -> Loader:
    # Not by a session's own setting: that of a profile which does not exist would raise, and descriptions need none.
    loader: Loader = create_loader(os.environ.get("AWS_DATA_PATH"))
    for description in ("service-2", "endpoint-rule-set-1", "paginators-1"):
        loader.load_service_model("s3", description)
    for name in ("endpoints", "partitions", "sdk-default-configuration"):
        loader.load_data(name)
    return loader


def _boto_session(profile: str | None, region: str | None) -> aiobotocore.session.AioSession:
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", descriptions())
    session.lazy_register_component("credential_provider", lambda: resolver_of(session, region))
    return session


def _options(table: OriginTable, max_connections: int, read_timeout_s: float | None) -> dict[str, Any]:
    given = dict(table.storage_options)
    client = {"region_name": table.region} if table.region else {}
    config = {
        "max_pool_connections": max_connections,
        "retries": {"total_max_attempts": 1},
        "connect_timeout": CONNECT_TIMEOUT_S,
        "http_session_cls": StoreSession,
        "read_timeout": read_timeout_s,
        "response_checksum_validation": "when_required",  # parts have no checksum of their own
    }
    return {
        "anon": table.anon,
        "endpoint_url": table.endpoint_url,
        **given,
        "client_kwargs": client | given.get("client_kwargs", {}),
        "config_kwargs": config | given.get("config_kwargs", {}),
        "asynchronous": True,
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


def keep_signature_v4(signature_version: str, **_context: Any) -> str | None:
    """Select signature version 4 for urls, as for requests; botocore would fall back to version 2 in older regions.

    Handler for botocore's events `choose-signer.s3.…`.
    """
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


class LedAwayError(OSError):
    """A redirect that does not state the bucket's region.

    botocore would ask for the region by a HEAD, and treat its answer the same way, hundreds of times.
    """


class _StayingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore session that does not follow redirects."""

    async def _get_session(self, proxy_url: str | None) -> "_Staying":
        return _Staying(await super()._get_session(proxy_url))


class StoreSession(_StayingSession):
    """Session that reuses connections, with a second one that does not; for `AioConfig(http_session_cls=…)`.

    After one of them stayed silent, idle ones are distrusted for `IDLE_S`: by then, those that were idle together
    with it are closed.
    """

    def __init__(self, *args: Any, connector_args: dict[str, Any] | None = None, **options: Any) -> None:
        pooled = _CONNECTOR | (connector_args or {})
        fresh = {name: value for name, value in pooled.items() if name != "keepalive_timeout"} | {"force_close": True}
        super().__init__(*args, connector_args=pooled, **options)
        self._fresh = _StayingSession(*args, connector_args=fresh, **options)
        self._trusted_from_s = self._answered_s = -math.inf  # time of the latest answer over a pooled connection

    async def __aenter__(self) -> "StoreSession":
        await self._fresh.__aenter__()
        await super().__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._fresh.__aexit__(*exc_info)
        await super().__aexit__(*exc_info)

    async def send(self, request: Any) -> Any:
        """Send a request; a GET or HEAD again over a new connection if an idle one stays silent.

        Raises LedAwayError.
        """
        repeatable = request.method in ("GET", "HEAD")
        answer = await (self._send_twice(request) if repeatable else super().send(request))
        if request.method == "HEAD" and answer.status_code in _REDIRECTS and _REGION not in answer.headers:
            raise LedAwayError(answer.status_code, "the server redirects")
        return answer

    async def _send_twice(self, request: Any) -> Any:
        loop = asyncio.get_running_loop()
        if (asked_s := loop.time()) >= self._trusted_from_s:
            try:
                async with asyncio.timeout(SILENCE_S) as patience:
                    answer = await super().send(request)
                self._answered_s = loop.time()
                return answer
            except TimeoutError:
                if not patience.expired():
                    raise
                self._trusted_from_s = loop.time() + IDLE_S
            except asyncio.CancelledError:
                if self._answered_s <= asked_s:  # otherwise the pool works, and this was the slower of two requests
                    self._trusted_from_s = loop.time() + IDLE_S
                raise
        return await self._fresh.send(request)


class _Staying:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, *args: Any, **options: Any) -> aiohttp.ClientResponse:
        answer = await self._session.request(*args, **options, allow_redirects=False)
        if sum(len(name) + len(value) for name, value in answer._raw_headers) > MAX_HEAD_BYTES:
            answer.close()
            raise HeadError
        # aiobotocore takes them for UTF-8. As Latin-1, each character is a byte, as in the transport workers' answers.
        answer._raw_headers = tuple(
            (name.decode("latin-1").encode(), value.decode("latin-1").encode()) for name, value in answer._raw_headers
        )
        return answer


def judge(exn: Exception, url: str) -> tuple[errors.ShardcacheError, bool]:
    """Translate one of `FOREIGN`; the result is also True if reloading the credentials may help.

    A RuntimeError that is not about credentials is a bug, and raised again.
    """
    cause = exn.__cause__ if isinstance(exn.__cause__, boto.ClientError) else exn
    if isinstance(cause, _STILL_EXPIRED) and "expired" not in str(cause):
        raise cause
    if isinstance(cause, _STILL_EXPIRED):
        return _expired(f"the credentials cannot be renewed: {cause}", url), True
    if isinstance(cause, _NO_CREDENTIALS):
        return errors.AccessDeniedError(f"there are no usable credentials ({cause})", url=url), True
    if isinstance(cause, boto.ClientError):
        code = _code(cause)
        return _answer_error(cause, url), code in _EXPIRED or code in _REFUSED - {"AccessDenied"}
    return _client_error(cause, url), False


def _client_error(exn: Exception, url: str) -> errors.ShardcacheError:
    if isinstance(exn, boto.ProfileNotFound):
        remedy = "correct `profile` in the [[origin]] table, or AWS_PROFILE, or create the profile"
        return errors.ConfigError(str(exn), url=url, remedy=remedy)
    if isinstance(exn, boto.ConfigParseError):
        return errors.ConfigError(str(exn), url=url, remedy="correct that file, or set AWS_CONFIG_FILE to another")
    if isinstance(exn, boto.BotoCoreError) and not isinstance(exn, _CONNECTION):
        return errors.OriginError(f"the S3 client rejects the request: {exn}", url=url)
    if isinstance(exn, LedAwayError):
        return error_of(exn.errno or 0, f"the origin answered with status {exn.errno}", url)
    if certificate := _cause(exn, ssl.SSLCertVerificationError):  # also a ValueError
        return certificate_error(certificate, url)
    if _cause(exn, HeadError) or _cause(exn, LineTooLong):
        return errors.OriginError(str(HeadError()), url=url, remedy=HEAD_REMEDY)
    if isinstance(exn, _NONSENSE):
        return errors.OriginUnavailableError(f"invalid answer from the origin: {exn!r}", url=url)
    if refused := _cause(exn, aiohttp.ClientConnectorError):
        return connection_error(failure(refused.os_error, f"{refused.host}:{refused.port}"), url)
    return connection_error(str(exn) or type(exn).__name__, url)


def _cause(exn: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of a kind behind an error of the SDK or a worker, if any."""
    while exn is not None and not isinstance(exn, kind):
        exn = exn.__cause__ or exn.__context__
    return exn


def _code(exn: boto.ClientError) -> str:
    return str(exn.response.get("Error", {}).get("Code", ""))


def _answer_error(exn: boto.ClientError, url: str) -> errors.ShardcacheError:
    code, status = _code(exn), exn.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = f"{exn.response.get('Error', {}).get('Message') or 'no reason given'} ({code}, status {status})"
    if code in _EXPIRED:
        return _expired(f"the credentials have expired: {text}", url)
    if code in _REFUSED:
        remedy = _DENIED if code == "AccessDenied" else None
        return errors.AccessDeniedError(f"the origin denies access: {text}", url=url, remedy=remedy)
    if code in _BUSY:
        return errors.OriginBusyError(f"the origin is throttling: {text}", url=url)
    if code in _TRANSIENT:
        return errors.OriginUnavailableError(f"temporary error at the origin: {text}", url=url)
    if code == "NoSuchBucket":
        return errors.NotFoundError("the bucket does not exist", url=url, remedy=_no_bucket(url))
    if status == 404:
        return errors.NotFoundError("the object does not exist in its bucket", url=url)
    return error_of(status, f"the origin answered: {text}", url)


def _no_bucket(url: str) -> str:
    bucket = url.partition("://")[2].partition("/")[0]
    return (
        "correct the bucket's name; or name the store that has it, by AWS_ENDPOINT_URL or "
        f"`endpoint_url`; or create it: aws s3 mb s3://{bucket}"
    )


def _expired(message: str, url: str) -> errors.ShardcacheError:
    remedy = "renew the daemon's credentials; it reloads them by itself"
    return errors.OriginUnavailableError(message, url=url, remedy=remedy)
