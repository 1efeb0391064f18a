"""Translation of S3, botocore and network errors into shardcache's."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardcacheError,
)
from shardcache.origin.http_status import certificate_error, connection_error, error_of
from shardcache.origin.s3.sdk_http import LedAwayError
from shardcache.transport.head import HEAD_REMEDY, HeadError
from shardcache.transport.sockets import failure

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """A translated error; `stale_credentials` if reloading the credentials may help."""

    error: ShardcacheError
    stale_credentials: bool = False


_DENIED = (
    "allow the daemon's credentials s3:GetObject and s3:ListBucket on this bucket; or give it others (AWS_PROFILE, or "
    "`profile` in an [[origin]] table), or `anon = true` for public data"
)


def judge(exn: Exception, url: str) -> Verdict:
    """Translate one of `FOREIGN`. A RuntimeError that is not about credentials is a bug, and raised again."""
    cause = exn.__cause__ if isinstance(exn.__cause__, boto.ClientError) else exn
    if isinstance(cause, _STILL_EXPIRED):
        if "expired" not in str(cause):
            raise cause
        return _expired(f"the credentials cannot be renewed: {cause}", url)
    if isinstance(cause, boto.ClientError):
        return _judge_answer(cause, url)
    if isinstance(cause, _NO_CREDENTIALS):
        return Verdict(AccessDeniedError(f"there are no usable credentials ({cause})", url=url), True)
    if isinstance(cause, boto.ProfileNotFound):
        remedy = "correct `profile` in the [[origin]] table, or AWS_PROFILE, or create the profile"
        return Verdict(ConfigError(str(cause), url=url, remedy=remedy))
    if isinstance(cause, boto.BotoCoreError) and not isinstance(cause, _CONNECTION):
        return Verdict(OriginError(f"the S3 client rejects the request: {cause}", url=url))
    if isinstance(cause, LedAwayError):
        return Verdict(error_of(cause.errno or 0, f"the origin answered with status {cause.errno}", url))
    if certificate := _cause(cause, ssl.SSLCertVerificationError):  # also a ValueError
        return Verdict(certificate_error(certificate, url))
    if _cause(cause, HeadError) or _cause(cause, LineTooLong):
        return Verdict(OriginError(str(HeadError()), url=url, remedy=HEAD_REMEDY))
    if isinstance(cause, _NONSENSE):
        return Verdict(OriginUnavailableError(f"invalid answer from the origin: {cause!r}", url=url))
    if refused := _cause(cause, aiohttp.ClientConnectorError):
        return Verdict(connection_error(failure(refused.os_error, f"{refused.host}:{refused.port}"), url))
    return Verdict(connection_error(str(cause) or type(cause).__name__, url))


def _cause(exn: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of a kind behind an error of the SDK or a worker, if any."""
    while exn is not None and not isinstance(exn, kind):
        exn = exn.__cause__ or exn.__context__
    return exn


def _judge_answer(exn: boto.ClientError, url: str) -> Verdict:
    error = exn.response.get("Error", {})
    code, status = str(error.get("Code", "")), exn.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = f"{error.get('Message') or 'no reason given'} ({code}, status {status})"
    if code in _EXPIRED:
        return _expired(f"the credentials have expired: {text}", url)
    if code in _REFUSED:
        denied = code == "AccessDenied"
        return Verdict(
            AccessDeniedError(f"the origin denies access: {text}", url=url, remedy=_DENIED if denied else None),
            not denied,
        )
    if code in _BUSY:
        return Verdict(OriginBusyError(f"the origin is throttling: {text}", url=url))
    if code in _TRANSIENT:
        return Verdict(OriginUnavailableError(f"temporary error at the origin: {text}", url=url))
    if code == "NoSuchBucket":
        return Verdict(NotFoundError("the bucket does not exist", url=url))
    if status == 404:
        return Verdict(NotFoundError("the object does not exist in its bucket", url=url))
    return Verdict(error_of(status, f"the origin answered: {text}", url))


def _expired(message: str, url: str) -> Verdict:
    remedy = "renew the daemon's credentials; it reloads them by itself"
    return Verdict(OriginUnavailableError(message, url=url, remedy=remedy), stale_credentials=True)
