"""Errors of the daemon as S3 answers them."""

import pytest

from shardcache.errors import (
    AccessDeniedError,
    CapacityError,
    NotFoundError,
    OriginBusyError,
    OriginError,
    OriginUnavailableError,
    ShardcacheError,
)
from shardcache.server.s3.error_documents import S3Error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFoundError, 404, "NoSuchKey"),
        (AccessDeniedError, 403, "AccessDenied"),
        (OriginUnavailableError, 503, "ServiceUnavailable"),
        (OriginBusyError, 503, "ServiceUnavailable"),
        (CapacityError, 503, "ServiceUnavailable"),
        (OriginError, 400, "InvalidRequest"),
        (ShardcacheError, 500, "InternalError"),
    ],
)
def test_clients_repeat_what_may_succeed_later(
    error: type[ShardcacheError], status: int, code: str
) -> None:
    """SDKs repeat a request after 5xx, but a refused one would be refused again."""
    answer = S3Error.of(error("what went wrong", url="s3://bucket/key"))
    assert answer.status == status
    assert answer.code == code
