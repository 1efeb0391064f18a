"""Requests of S3 clients: bucket and key, range, and conditions.

`s3_endpoint` parses each request as an `S3Request`; `object_answers` and `bucket_answers` read its
fields. A span is start and end of bytes of an object. A condition is a header such as If-Match,
with which a client asks for an object only if it has, or no longer has, a certain version.
"""

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_plus, unquote_to_bytes

from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.signatures import SignedRequest
from shardcache.shared.urls.url_names import path_of
from shardcache.store.part_file import Span

# A number in a range may be larger than any object, but Python refuses to convert thousands of
# digits.
_RANGE = re.compile(r"bytes=(?:([0-9]{1,99})-([0-9]{0,99})|-([0-9]{1,99}))")
_MAX_DIGITS = 18  # maximum number of digits of a number in the query
_SHOWN_CHARS = 40  # number of characters of a wrong number that an error shows
_SHOWN_NAME_CHARS = 80  # number of characters of a wrong host or bucket that an error shows
_MALFORMED_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MAX_KEY_BYTES = 1024
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class S3Request(NamedTuple):
    """One request, parsed.

    Attributes:
        signed: the parts of the request that its signature covers.
        bucket: the bucket's name; empty for the service itself.
        key: the object's key; empty for the bucket itself.
        params: the query's parameters, by name; the value is empty for a name without a value.
    """

    signed: SignedRequest
    bucket: str
    key: str
    params: Mapping[str, str]

    @classmethod
    def parse(cls, method: str, target: str, headers: Mapping[str, str]) -> "S3Request":
        """Parse a request. Raises S3Error.

        Args:
            target: path and query as they were sent.
            headers: headers by name in lower case.
        """
        path, _, query = target.partition("?")
        bucket, key = _bucket_and_key(path, headers.get("host", ""))
        signed = SignedRequest(method, path, query, headers)
        return cls(signed, bucket, key, _params(query))

    @property
    def bucket_url(self) -> str:
        """The beginning of all urls in the bucket."""
        return f"s3://{self.bucket}/"

    @property
    def url(self) -> str:
        """The url of the object."""
        return self.bucket_url + self.key

    def header(self, name: str) -> str | None:
        """Return a header by its name in lower case; None if the request does not have it."""
        return self.signed.headers.get(name)

    def number(self, name: str, *, lowest: int, highest: int) -> int | None:
        """Return a parameter of the query as a number; None if the query does not have it.

        Raises S3Error for a value that is not a number, or not within the bounds.
        """
        text = self.params.get(name)
        if text is None:
            return None
        is_number = text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
        if not is_number:
            shown = text[:_SHOWN_CHARS]
            raise S3Error("InvalidArgument", f"{name} has to be a number, not {shown!a}")
        if not lowest <= int(text) <= highest:
            raise S3Error("InvalidArgument", f"{name} has to be from {lowest} to {highest}")
        return int(text)


def parse_range(header: str | None, size_bytes: int) -> Span | None:
    """Return the range that a Range header asks for; None for the whole object.

    Raises S3Error for a range beyond the object's end.

    Args:
        header: the header's value; None if the request does not have the header.
        size_bytes: size of the object.
    """
    if header is None:
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        return None  # several ranges, or a malformed range: S3 sends the whole object
    first, last, suffix = match.groups()
    if suffix is not None:  # `bytes=-5`: the last five bytes
        start = max(0, size_bytes - int(suffix))
        end = size_bytes
    elif last:  # `bytes=5-9`
        start = int(first)
        if int(last) < start:
            return None  # malformed, too
        end = min(int(last) + 1, size_bytes)
    else:  # `bytes=5-`
        start = int(first)
        end = size_bytes
    if start >= end:
        raise S3Error(
            "InvalidRange",
            f"the object has {size_bytes} bytes; ask for some of those",
            {"Content-Range": f"bytes */{size_bytes}"},
        )
    return start, end


def applicable_range(request: S3Request, etag: str, modified_s: float) -> str | None:
    """Return a request's Range header; None if there is none, or it does not apply.

    A client that resumes a download sends If-Range with the version whose bytes it has. If the
    object has another version now, the range does not apply: the client needs the whole object.

    Args:
        etag: ETag of the present version, without quotes.
        modified_s: time at which this version was stored, in seconds since the Unix epoch.
    """
    validator = request.header("if-range")
    if validator is None or validator.strip().strip('"') == etag:
        return request.header("range")
    if _time_in(validator) == int(modified_s):
        return request.header("range")
    return None


def check_conditions(request: S3Request, etag: str, modified_s: float) -> None:
    """Raise S3Error if a condition of the request is not met by the object's present version.

    A condition on the time is ignored if there is a condition on the ETag (RFC 9110, 13.2.2).

    Args:
        etag: ETag of the present version, without quotes.
        modified_s: time at which this version was stored, in seconds since the Unix epoch.
    """
    if _CONDITIONS.isdisjoint(request.signed.headers):
        return
    headers = {"ETag": f'"{etag}"'}  # headers of the answer if a condition is not met
    if_match = request.header("if-match")
    unmodified_s = _time_in(request.header("if-unmodified-since"))
    if if_match is not None:
        if not _includes(if_match, etag, is_strong=True):
            message = "the object has another ETag than If-Match"
            raise S3Error("PreconditionFailed", message, headers)
    elif unmodified_s is not None and int(modified_s) > unmodified_s:
        message = "the object was stored after If-Unmodified-Since"
        raise S3Error("PreconditionFailed", message, headers)

    if_none_match = request.header("if-none-match")
    modified_since_s = _time_in(request.header("if-modified-since"))
    if if_none_match is not None:
        if _includes(if_none_match, etag):
            raise S3Error("NotModified", "the object has the ETag of If-None-Match", headers)
    elif modified_since_s is not None and int(modified_s) <= modified_since_s:
        raise S3Error("NotModified", "the object was not stored after If-Modified-Since", headers)


def _includes(header: str, etag: str, *, is_strong: bool = False) -> bool:
    """Return whether a header's list of ETags has an ETag, or is `*`.

    Args:
        header: ETags in quotes, separated by commas; `W/` before an ETag marks it as weak.
        etag: the ETag without quotes.
        is_strong: True if a weak ETag does not count: objects with the same weak ETag may have
            different bytes.
    """
    tags = [tag.strip() for tag in header.split(",")]
    if not is_strong:
        tags = [tag.removeprefix("W/") for tag in tags]
    unquoted = [tag.strip('"') for tag in tags]  # a tag that still has its W/ equals no ETag
    return "*" in tags or etag in unquoted


def _time_in(header: str | None) -> float | None:
    """Return the time in a header, in seconds since the Unix epoch.

    Returns None without a header, and for an invalid time: S3 ignores such a condition.
    """
    if header is None:
        return None
    try:
        time = parsedate_to_datetime(header)
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)  # the form of asctime names no zone (RFC 9110, 5.6.7)
        return time.timestamp()
    except (ValueError, OverflowError):
        return None


@lru_cache(1024)
def _bucket_and_key(path: str, host: str) -> tuple[str, str]:
    """Return bucket and key of a request, either of which may be empty. Raises S3Error.

    The result is cached, because clients send the same path for many ranges.

    Args:
        path: path as it was sent, percent-encoded.
        host: value of the header Host.
    """
    _check_host(host)
    if not path.startswith("/"):
        raise S3Error("InvalidURI", "the request's target has to begin with /")
    key = _decoded(path).removeprefix("/")
    bucket = _bucket_of_host(host)
    if not bucket:
        bucket, _, key = key.partition("/")
    is_for_service = not bucket and not key
    if not is_for_service and _BUCKET.fullmatch(bucket) is None:
        shown = bucket[:_SHOWN_NAME_CHARS]
        raise S3Error("InvalidBucketName", f"{shown!a} is not a valid bucket name")
    if len(key.encode()) > _MAX_KEY_BYTES:
        raise S3Error("KeyTooLongError", f"a key has at most {_MAX_KEY_BYTES} bytes")
    url = f"s3://{bucket}/{key}"
    if path_of(url) != url:
        # The daemon would read the object whose key lacks this ending.
        raise S3Error(
            "InvalidRequest",
            "the key ends like a url with a version or a key split; read it from the object store",
        )
    return bucket, key


def _check_host(host: str) -> None:
    """Raise S3Error unless a host is a name of the loopback, or `BUCKET.localhost`.

    Any other name may be that of a web site which makes it resolve to the loopback (DNS rebinding),
    so that its pages can send requests to the endpoint.
    """
    name = _without_port(host)
    is_local = name in _LOCAL_HOSTS or name.endswith(".localhost")
    if not is_local:
        raise S3Error(
            "AccessDenied",
            f"{host[:_SHOWN_NAME_CHARS]!a} is not a loopback name of this node; use the address "
            "of --s3",
        )


def _decoded(path: str) -> str:
    """Return a path without its percent-encoding. Raises S3Error."""
    if _MALFORMED_ESCAPE.search(path):
        raise S3Error("InvalidURI", "a % in the path has to be followed by two hexadecimal digits")
    try:
        return unquote_to_bytes(path.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI", "the path has to be percent-encoded UTF-8") from None


def _bucket_of_host(host: str) -> str:
    """Return the bucket of a virtual host, `BUCKET.localhost`; empty for another host."""
    name = _without_port(host)
    if not name.endswith(".localhost"):
        return ""
    return name.removesuffix(".localhost")


def _without_port(host: str) -> str:
    """Return the name in a Host header, in lower case."""
    name = host
    if ":" in host and not host.endswith("]"):  # the colons of [::1] precede no port
        name, _, _ = host.rpartition(":")
    return name.lower()


def _params(query: str) -> dict[str, str]:
    """Return the parameters of a query, decoded, by name."""
    params = {}
    for pair in query.split("&"):
        if pair:
            name, _, value = pair.partition("=")
            params[unquote_plus(name)] = unquote_plus(value)
    return params
