"""Requests of S3 clients: the times in their headers."""

import time
from collections.abc import Iterator

import pytest

from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.s3_requests import S3Request, check_conditions

STORED_S = 784_111_777.0
FORMS = (
    "Sun, 06 Nov 1994 08:49:37 GMT",
    "Sunday, 06-Nov-94 08:49:37 GMT",
    "Sun Nov  6 08:49:37 1994",
)
"""One time, in the three forms that HTTP has (RFC 9110, 5.6.7)."""


@pytest.fixture
def tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node whose local time is nine hours ahead."""
    with monkeypatch.context() as context:
        context.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("tokyo")
def test_times_are_gmt_in_every_form(form: str) -> None:
    """The last form names no zone; the node's local time does not count."""
    request = S3Request.parse(
        "GET", "/bucket/key", {"host": "localhost", "if-modified-since": form}
    )
    with pytest.raises(S3Error, match="not stored after"):
        check_conditions(request, "etag", STORED_S)
    check_conditions(request, "etag", STORED_S + 1)
