"""What S3, botocore and the network say, in this project's words."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import aiohttp
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
from shardcache.origin.s3_http import LedAwayError
from shardcache.origin.status import certificate_error, error_of

# What an answer raises that lacks a field, or has one that cannot be read.
_NONSENSE = (ResponseParserError, KeyError, ValueError)
# What botocore raises where credentials are as old as before once they were renewed.
_STILL_EXPIRED = RuntimeError
# Everything that a call of s3fs or a look at its answer may raise; s3fs makes OSErrors of S3's refusals.
FOREIGN = (boto.BotoCoreError, boto.ClientError, aiohttp.ClientError, OSError, *_NONSENSE, _STILL_EXPIRED)

# Of botocore's own errors, those that are no fault of the request.
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
    """A translated error, and whether credentials read afresh might do better."""

    error: ShardcacheError
    stale_credentials: bool = False


def judge(exn: Exception, url: str) -> Verdict:
    """Translate one of `FOREIGN`. Raises a RuntimeError that is not about credentials: it is a bug."""
    cause = exn.__cause__ if isinstance(exn.__cause__, boto.ClientError) else exn
    if isinstance(cause, _STILL_EXPIRED):
        if "expired" not in str(cause):
            raise cause
        return _expired(f"the daemon's credentials cannot be renewed: {cause}", url)
    if isinstance(cause, boto.ClientError):
        return _judge_answer(cause, url)
    if isinstance(cause, _NO_CREDENTIALS):
        return Verdict(AccessDeniedError(f"the daemon has no usable credentials ({cause})", url=url), True)
    if isinstance(cause, boto.ProfileNotFound):
        remedy = "correct `profile` in the [[origin]] table, or AWS_PROFILE, or write the profile"
        return Verdict(ConfigError(str(cause), url=url, remedy=remedy))
    if isinstance(cause, boto.BotoCoreError) and not isinstance(cause, _CONNECTION):
        return Verdict(OriginError(f"the S3 client refuses: {cause}", url=url))
    if isinstance(cause, LedAwayError):
        return Verdict(error_of(cause.errno or 0, f"the store answered with status {cause.errno}", url))
    if certificate := _certificate_failure(cause):  # which is a ValueError, too
        return Verdict(certificate_error(certificate, url))
    if isinstance(cause, _NONSENSE):
        return Verdict(OriginUnavailableError(f"the store's answer makes no sense: {cause!r}", url=url))
    detail = str(cause) or type(cause).__name__
    return Verdict(OriginUnavailableError(f"the connection to the store failed: {detail}", url=url))


def _certificate_failure(exn: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return the failure of a certificate that is behind an error of the SDK's or of a worker's."""
    while exn is not None and not isinstance(exn, ssl.SSLCertVerificationError):
        exn = exn.__cause__ or exn.__context__
    return exn


def _judge_answer(exn: boto.ClientError, url: str) -> Verdict:
    error = exn.response.get("Error", {})
    code, status = str(error.get("Code", "")), exn.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    text = f"{error.get('Message') or 'no reason given'} ({code}, status {status})"
    if code in _EXPIRED:
        return _expired(f"the store says that the credentials have expired: {text}", url)
    if code in _REFUSED:
        return Verdict(AccessDeniedError(f"the store denies access: {text}", url=url), code != "AccessDenied")
    if code in _BUSY:
        return Verdict(OriginBusyError(f"the store is too busy: {text}", url=url))
    if code in _TRANSIENT:
        return Verdict(OriginUnavailableError(f"the store asks to wait: {text}", url=url))
    if code == "NoSuchBucket":
        return Verdict(NotFoundError("the bucket does not exist", url=url))
    if status == 404:
        return Verdict(NotFoundError("the object does not exist in its bucket", url=url))
    return Verdict(error_of(status, f"the store answered: {text}", url))


def _expired(message: str, url: str) -> Verdict:
    remedy = "renew the daemon's credentials; it reads them again by itself"
    return Verdict(OriginUnavailableError(message, url=url, remedy=remedy), stale_credentials=True)
