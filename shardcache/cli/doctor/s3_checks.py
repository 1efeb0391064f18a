"""Checks of the daemon's S3 endpoint, for `shardcache doctor`."""

from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from shardcache.cli.doctor.context import Context, Finding, failed, ok

_LIMIT_S = 5.0
_ACCESS_DENIED = b"<Code>AccessDenied</Code>"  # part of S3's answer to an unsigned request


def check_endpoint(context: Context) -> Finding | None:
    """Check that the daemon's S3 endpoint answers; None if the daemon has no endpoint.

    The request is not signed, so the endpoint has to refuse it as S3 does.
    """
    if context.status is None or not context.status.get("s3"):
        return None
    address = context.status["s3"]
    where = f"the S3 endpoint at {address}"
    try:
        with closing(HTTPConnection(address, timeout=_LIMIT_S)) as connection:
            connection.request("GET", "/")
            answer = connection.getresponse()
            body = answer.read()
    except (OSError, HTTPException) as exn:
        cause = str(exn) or type(exn).__name__
        return failed(f"{where} does not answer", cause, "read the daemon's log, or restart it")
    if answer.status != HTTPStatus.FORBIDDEN or _ACCESS_DENIED not in body:
        cause = f"the status is {answer.status}, where an unsigned request is refused by 403"
        return failed(
            f"another program answers in place of {where}",
            cause,
            "look for a proxy (http_proxy), or choose another --s3",
        )
    return ok(f"{where} answers those who have keys: shardcache credentials")
