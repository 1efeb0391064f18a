"""Errors by HTTP status."""

from __future__ import annotations

from shardcache.access.protocols import WEB
from shardcache.access.urls import protocol_of
from shardcache.errors import (
    AccessDeniedError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardChangedError,
)

_MEANING: dict[int, type[OriginError]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: NotFoundError,
    407: AccessDeniedError,
    408: OriginUnavailableError,
    409: OriginUnavailableError,
    410: NotFoundError,
    412: ShardChangedError,
    416: OriginUnavailableError,
    425: OriginUnavailableError,
    429: OriginBusyError,
    501: OriginError,
    503: OriginBusyError,
    505: OriginError,
}


_ELSEWHERE = "this redirect is not followed: use its target in the url or as `endpoint_url`"
_DENIED = (
    "if the url is signed, sign it again; else give the daemon a header that the server accepts "
    "(`storage_options` in an [[origin]] table)"
)


def error_of(status: int, message: str, url: str) -> OriginError:
    """Return the error for a status other than 200, 206 and 304."""
    default = OriginUnavailableError if status >= 500 else OriginError
    denied = _MEANING.get(status) is AccessDeniedError and protocol_of(url) in WEB
    remedy = _ELSEWHERE if 300 <= status < 400 else _DENIED if denied else None
    return _MEANING.get(status, default)(message, url=url, remedy=remedy)


def connection_error(reason: str, url: str) -> OriginError:
    """Return the error for a connection that failed, or that there was none of: such a reason names the server."""
    named = reason.startswith(("connection refused", "no connection"))
    return OriginUnavailableError(reason if named else f"the connection to the server failed: {reason}", url=url)


def certificate_error(exn: Exception, url: str) -> OriginError:
    """Return the error for a server whose certificate is not trusted; a retry would not help."""
    return OriginError(
        f"the server's certificate is not trusted: {exn}",
        url=url,
        remedy="trust its CA (AWS_CA_BUNDLE or `ca_bundle` for S3, SSL_CERT_FILE for web servers), or check the "
        "host name and this machine's clock",
    )
