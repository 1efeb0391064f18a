"""Errors for HTTP answers by status, for connections that fail, and for certificates.

The origins that read over HTTP call these functions to raise shardcache's errors.
"""

import ssl
import time
from calendar import timegm
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate

from shardcache.access.protocols import WEB
from shardcache.access.urls import protocol_of
from shardcache.shared import exceptions
from shardcache.shared.urls.signed_urls import expiry_s
from shardcache.transport.http.http_heads import number_in

# Classes of the errors by status. Only an OriginUnavailableError, or OriginBusyError, which is one,
# is followed by another attempt. For any other status, only its first digit counts.
_CLASSES: dict[int, type[exceptions.OriginError]] = {
    401: exceptions.AccessDeniedError,
    403: exceptions.AccessDeniedError,
    404: exceptions.NotFoundError,
    407: exceptions.AccessDeniedError,
    408: exceptions.OriginUnavailableError,
    409: exceptions.OriginUnavailableError,
    410: exceptions.NotFoundError,
    412: exceptions.ShardChangedError,
    # Ranges are within the size that the server itself stated: another attempt may succeed.
    416: exceptions.OriginUnavailableError,
    425: exceptions.OriginUnavailableError,
    429: exceptions.OriginBusyError,
    501: exceptions.OriginError,
    503: exceptions.OriginBusyError,
    505: exceptions.OriginError,
}

# Statuses with which stores answer a request to a url whose signature has expired; Google's is 400.
_EXPIRED = (400, 401, 403)

_NO_HEADERS: Mapping[str, str] = {}
_REDIRECT_REMEDY = "this redirect is not followed: use its target in the url or as `endpoint_url`"
_DENIED_REMEDY = (
    "if the url is signed, sign it again; else give the daemon a header that the server accepts "
    "(`storage_options` in an [[origin]] table)"
)


def error_of(
    status: int,
    message: str,
    url: str,
    headers: Mapping[str, str] = _NO_HEADERS,
) -> exceptions.OriginError:
    """Return the error for a status other than 200, 206 and 304.

    Args:
        message: the problem; a reason that the url or the headers state is added to it.
        headers: headers of the answer, which may have Retry-After and Azure's error code.
    """
    error_class = _error_class(status)
    expires_s = expiry_s(url)
    if status in _EXPIRED and expires_s is not None and expires_s <= time.time():
        error_class = exceptions.AccessDeniedError
        expiry = datetime.fromtimestamp(expires_s, UTC)
        message = f"the signature of the url expired at {expiry:%Y-%m-%d %H:%M:%S} UTC: {message}"
    azure_code = headers.get("x-ms-error-code")
    if azure_code:
        message = f"{message} ({azure_code})"
    error = error_class(message, url=url, remedy=_remedy(status, error_class, url))
    if isinstance(error, exceptions.OriginUnavailableError):
        error.retry_after_s = _retry_after_s(headers)
    return error


def _error_class(status: int) -> type[exceptions.OriginError]:
    """Return the class of the error for a status."""
    if status in _CLASSES:
        return _CLASSES[status]
    if status >= 500:
        return exceptions.OriginUnavailableError
    return exceptions.OriginError


def _remedy(status: int, error_class: type[exceptions.OriginError], url: str) -> str | None:
    """Return the remedy for a status; None for the usual remedy of the error's class."""
    if 300 <= status < 400:
        return _REDIRECT_REMEDY
    if error_class is exceptions.AccessDeniedError and protocol_of(url) in WEB:
        return _DENIED_REMEDY
    return None


def _retry_after_s(headers: Mapping[str, str]) -> int:
    """Return the seconds to wait by Retry-After, which is a number or a date; 0 without it."""
    field = headers.get("retry-after", "")
    seconds = number_in(field)
    if seconds:
        return seconds
    return max(0, timestamp(field) - round(time.time()))


def timestamp(date: str | None) -> int:
    """Return the POSIX time of an HTTP date; 0 for any other text."""
    try:
        fields = parsedate(date)
        if fields is None:
            return 0
        return timegm(fields)
    except (ValueError, OverflowError):
        return 0


@contextmanager
def translate_transport_errors(url: str) -> Iterator[None]:
    """Translate the exceptions of the transport in the block into shardcache's.

    Args:
        url: the url that is requested, for the errors.
    """
    try:
        yield
    except ssl.SSLCertVerificationError as exn:
        raise certificate_error(exn, url) from exn
    # This comes before OSError: a NotFoundError is also an OSError.
    except exceptions.ShardcacheError as exn:
        exn.url = exn.url or url
        raise
    except OSError as exn:
        raise connection_error(str(exn), url) from exn


def connection_error(reason: str, url: str) -> exceptions.OriginError:
    """Return the error for a connection that failed or could not be made."""
    # Reasons that begin like this are the transport's own texts for connections that could not be
    # made, such as "connection refused by HOST:PORT". Any other reason is the system's text for a
    # connection that broke, such as "Connection reset by peer", which does not name the server.
    names_server = reason.startswith(("connection refused", "no connection"))
    if not names_server:
        reason = f"the connection to the server failed: {reason}"
    return exceptions.OriginUnavailableError(reason, url=url)


def certificate_error(exn: Exception, url: str) -> exceptions.OriginError:
    """Return the error for a server whose certificate is not trusted; a retry would not help."""
    return exceptions.OriginError(
        f"the server's certificate is not trusted: {exn}",
        url=url,
        remedy="trust its CA (AWS_CA_BUNDLE or `ca_bundle` for S3, SSL_CERT_FILE for all others), "
        "or check the host name and this machine's clock",
    )
