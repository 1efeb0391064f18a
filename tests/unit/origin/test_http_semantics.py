"""Choice of a proxy, compared with that of the S3 SDK; the time that a busy server asks to wait."""

import time
from email.utils import formatdate

import pytest
from botocore.utils import get_environ_proxies

from shardcache.errors import OriginBusyError
from shardcache.origin.http.http_errors import error_of
from shardcache.origin.http.http_semantics import proxy_of

PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxy"),
    [
        ("http://minio/a.tar", "", PROXY),
        ("http://minio/a.tar", "minio", None),
        ("http://minio:9000/a.tar", "minio", None),
        ("http://minio:9000/a.tar", "minio:9000", None),
        ("http://minio:9001/a.tar", "minio:9000", PROXY),
        ("http://a.corp:9000/a.tar", "other, .corp:9000", None),
        ("http://a.corp:9000/a.tar", "corp", None),
        ("http://acorp/a.tar", "corp", PROXY),
        ("http://10.0.0.5:9000/a.tar", "10.0.0.5:9000", None),
        ("http://[::1]:9000/a.tar", "[::1]", None),
        ("http://minio/a.tar", "*", None),
        ("https://minio/a.tar", "", None),
    ],
)
def test_the_proxy_is_the_one_that_the_sdk_chooses(
    url: str, no_proxy: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By scheme, and directly to hosts in `no_proxy`, whose names may have a port."""
    for name in ("HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("no_proxy", no_proxy)
    assert proxy_of(url) == get_environ_proxies(url).get(url.partition(":")[0]) == proxy
    monkeypatch.setenv("http_proxy", PROXY.removeprefix("http://"))
    assert proxy_of(url) == proxy, "one without a scheme speaks HTTP"


def test_retry_after_is_a_number_of_seconds_or_a_date() -> None:
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    for given, shortest_s, longest_s in (
        ("7", 7, 7),
        (in_a_minute, 55, 60),
        ("soon", 0, 0),
        (formatdate(0), 0, 0),
    ):
        error = error_of(503, "busy", "s3://b/k", {"retry-after": given})
        assert isinstance(error, OriginBusyError)
        assert shortest_s <= error.retry_after_s <= longest_s
