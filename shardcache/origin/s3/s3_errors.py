"""Translation of errors of the S3 SDK (s3fs on aiobotocore) into shardcache's errors.

`s3_sessions` calls `translation` for each exception of a request. A code is the name that S3 gives
an error in its answer, such as `SlowDown`.
"""

import ssl
from typing import NamedTuple, TypeVar

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from shardcache.origin.http.http_errors import certificate_error, connection_error, error_of
from shardcache.shared import exceptions
from shardcache.shared.own_endpoint import ENDPOINT_HEADER, OWN_ENDPOINT, OWN_ENDPOINT_REMEDY
from shardcache.shared.urls.url_names import version_in
from shardcache.transport.http.http_heads import HEAD_REMEDY, HeadError
from shardcache.transport.http.sockets import connection_failure

E = TypeVar("E", bound=Exception)

# Raised for an answer with a missing or unreadable field.
_UNREADABLE = (ResponseParserError, KeyError, ValueError)
# The exception that botocore raises when credentials are still expired after a refresh.
_STILL_EXPIRED = RuntimeError

FOREIGN = (
    boto.BotoCoreError,
    boto.ClientError,
    aiohttp.ClientError,
    OSError,
    *_UNREADABLE,
    _STILL_EXPIRED,
)
"""All exceptions that an s3fs call or the parsing of its answer may raise.

They include OSError, because s3fs raises S3's refusals as OSErrors.
"""

# botocore's errors for a connection that failed: the request itself may be valid.
_CONNECTION = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError)
# botocore's errors for credentials that are missing or cannot be obtained.
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.SSOError,
    boto.UnauthorizedSSOTokenError,
    boto.TokenRetrievalError,
    boto.RefreshWithMFAUnsupportedError,
)

# Codes of S3's answers
_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"},
)
_REFUSED = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "RequestTimeTooSkewed"},
)
# Codes that depend on the credentials: a request with other, valid credentials does not get them.
_WRONG_CREDENTIALS = _EXPIRED | (_REFUSED - {"AccessDenied"})
_BUSY = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    },
)
_TRANSIENT = frozenset({"RequestTimeout", "InternalError"})
# Codes of answers to requests for one version: there is no version with this id, the id is invalid,
# or the version is a delete marker.
_NO_VERSION = frozenset({"NoSuchVersion", "InvalidArgument", "MethodNotAllowed"})

_NO_VERSION_REMEDY = (
    "list the versions: aws s3api list-object-versions --bucket BUCKET --prefix KEY; or leave "
    "?versionId=… out for the present one"
)
_DENIED_REMEDY = (
    "allow the daemon's credentials s3:GetObject and s3:ListBucket on this bucket; or give it "
    "others (AWS_PROFILE, or `profile` in an [[origin]] table), or `anon = true` for public data"
)


class RedirectError(OSError):
    """A redirect that does not state the bucket's region.

    botocore would send a HEAD to find the region, and treat a redirect of that HEAD in the same
    way, hundreds of times.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the server redirects with status {status}")
        self.status = status


class Translation(NamedTuple):
    """Translation of a foreign exception.

    Attributes:
        error: shardcache's error.
        may_help_to_reload: True if the request may succeed once the credentials are loaded again.
    """

    error: exceptions.ShardcacheError
    may_help_to_reload: bool


def translation(exn: Exception, url: str) -> Translation:
    """Return the translation of one of `FOREIGN`.

    A RuntimeError that is not about credentials is a bug, so it is raised again.
    """
    cause = _without_s3fs(exn)
    if isinstance(cause, _STILL_EXPIRED):
        if "expired" not in str(cause):
            raise cause
        error = _expired(f"the credentials cannot be renewed: {cause}", url)
        return Translation(error, may_help_to_reload=True)
    if isinstance(cause, _NO_CREDENTIALS):
        message = f"there are no usable credentials ({cause})"
        error = exceptions.AccessDeniedError(message, url=url)
        return Translation(error, may_help_to_reload=True)
    if isinstance(cause, boto.ClientError):
        depends_on_credentials = _code(cause) in _WRONG_CREDENTIALS
        return Translation(_answer_error(cause, url), depends_on_credentials)
    return Translation(_client_error(cause, url), may_help_to_reload=False)


def translation_with_temporary_keys(exn: Exception, url: str) -> Translation:
    """Return the same as `translation`, for a request with temporary keys.

    If the keys have expired, S3 answers a HEAD with status 400 and no body. botocore then takes the
    status for the code.
    """
    cause = _without_s3fs(exn)
    if isinstance(cause, boto.ClientError) and _code(cause) == "400":
        error = _expired("the request was refused, as with credentials that have expired", url)
        return Translation(error, may_help_to_reload=True)
    return translation(exn, url)


def _without_s3fs(exn: Exception) -> Exception:
    """Return botocore's error for S3's refusal, if s3fs has turned it into an OSError."""
    return exn.__cause__ if isinstance(exn.__cause__, boto.ClientError) else exn


def _client_error(exn: Exception, url: str) -> exceptions.ShardcacheError:
    """Return the error for an exception of the client, which is not S3's answer."""
    # 1. The client does not send the request.
    if isinstance(exn, boto.ProfileNotFound):
        remedy = "correct `profile` in the [[origin]] table, or AWS_PROFILE, or create the profile"
        return exceptions.ConfigError(str(exn), url=url, remedy=remedy)
    if isinstance(exn, boto.ConfigParseError):
        remedy = "correct that file, or set AWS_CONFIG_FILE to another"
        return exceptions.ConfigError(str(exn), url=url, remedy=remedy)
    if isinstance(exn, boto.BotoCoreError) and not isinstance(exn, _CONNECTION):
        return exceptions.OriginError(f"the S3 client rejects the request: {exn}", url=url)

    # 2. The server does not speak S3, or is not trusted.
    if isinstance(exn, RedirectError):
        return error_of(exn.status, f"the origin answered with status {exn.status}", url)
    # This comes before _UNREADABLE: an SSLCertVerificationError is also a ValueError.
    distrust = _cause_of_class(exn, ssl.SSLCertVerificationError)
    if distrust is not None:
        return certificate_error(distrust, url)
    if _cause_of_class(exn, HeadError) or _cause_of_class(exn, LineTooLong):
        return exceptions.OriginError(str(HeadError()), url=url, remedy=HEAD_REMEDY)
    if isinstance(exn, _UNREADABLE):
        return exceptions.OriginUnavailableError(
            f"invalid answer from the origin: {exn!r}", url=url
        )

    # 3. There is no connection, or it has failed.
    connector_error = _cause_of_class(exn, aiohttp.ClientConnectorError)
    if connector_error is not None:
        place = f"{connector_error.host}:{connector_error.port}"
        return connection_error(connection_failure(connector_error.os_error, place), url)
    return connection_error(str(exn) or type(exn).__name__, url)


def _cause_of_class(exn: BaseException | None, wanted: type[E]) -> E | None:
    """Return the first of an exception and its causes that is of a class; None if none is."""
    while exn is not None and not isinstance(exn, wanted):
        exn = exn.__cause__ or exn.__context__
    return exn


def _code(exn: boto.ClientError) -> str:
    """Return the code that S3's answer states; empty if it states none."""
    return str(exn.response.get("Error", {}).get("Code", ""))


def _answer_error(exn: boto.ClientError, url: str) -> exceptions.ShardcacheError:
    """Return the error for an answer of S3."""
    code = _code(exn)
    metadata = exn.response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    stated = exn.response.get("Error", {}).get("Message") or "no reason given"
    reason = f"{stated} ({code}, status {status})"

    if ENDPOINT_HEADER in metadata.get("HTTPHeaders", {}):
        return exceptions.ConfigError(OWN_ENDPOINT, url=url, remedy=OWN_ENDPOINT_REMEDY)
    if code in _EXPIRED:
        return _expired(f"the credentials have expired: {reason}", url)
    if code in _REFUSED:
        remedy = _DENIED_REMEDY if code == "AccessDenied" else None
        message = f"the origin denies access: {reason}"
        return exceptions.AccessDeniedError(message, url=url, remedy=remedy)
    if code in _BUSY:
        return exceptions.OriginBusyError(f"the origin is throttling: {reason}", url=url)
    if code in _TRANSIENT:
        message = f"temporary error at the origin: {reason}"
        return exceptions.OriginUnavailableError(message, url=url)
    if code == "NoSuchBucket":
        message = "the bucket does not exist"
        return exceptions.NotFoundError(message, url=url, remedy=_no_bucket_remedy(url))
    _, version = version_in(url)
    if code in _NO_VERSION and version:
        message = f"the object has no such version: {reason}"
        return exceptions.NotFoundError(message, url=url, remedy=_NO_VERSION_REMEDY)
    if status == 404:
        return exceptions.NotFoundError("the object does not exist in its bucket", url=url)
    return error_of(status, f"the origin answered: {reason}", url)


def _no_bucket_remedy(url: str) -> str:
    """Return the remedy for a url whose bucket does not exist."""
    bucket = url.partition("://")[2].partition("/")[0]
    return (
        "correct the bucket's name; or name the store that has it, by AWS_ENDPOINT_URL or "
        f"`endpoint_url`; or create it: aws s3 mb s3://{bucket}"
    )


def _expired(message: str, url: str) -> exceptions.ShardcacheError:
    """Return the error for credentials that have expired."""
    remedy = "renew the daemon's credentials; it reloads them by itself"
    error = exceptions.OriginUnavailableError(message, url=url, remedy=remedy)
    error.has_expired = True
    return error
