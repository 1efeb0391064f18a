"""Selections: the bytes of an object that a request of an S3 client asks for.

A request asks for a whole object, a range of it, or a part in which it was uploaded. A selection
also has the headers by which the answer describes the object.
"""

from email.utils import formatdate
from functools import lru_cache
from typing import NamedTuple

from shardcache.origin.objects import RemoteObject
from shardcache.server.s3.error_documents import S3Error
from shardcache.server.s3.s3_requests import (
    S3Request,
    applicable_range,
    check_conditions,
    parse_range,
)
from shardcache.store.part_file import Span

# Parameters of a request that set a header of its answer, and these headers.
_HEADER_OF_PARAM = {
    "response-cache-control": "Cache-Control",
    "response-content-disposition": "Content-Disposition",
    "response-content-encoding": "Content-Encoding",
    "response-content-language": "Content-Language",
    "response-content-type": "Content-Type",
    "response-expires": "Expires",
}


class Selection(NamedTuple):
    """Bytes of an object that one request selects: all, a range, or an uploaded part.

    Attributes:
        obj: the object, in the version that is answered.
        span: start and end of the bytes.
        is_range: True if the answer is for a range (206), False for the whole object (200).
        headers: headers of the answer.
    """

    obj: RemoteObject
    span: Span
    is_range: bool
    headers: dict[str, str]

    @property
    def size_bytes(self) -> int:
        """Number of selected bytes."""
        start, end = self.span
        return end - start

    @property
    def status(self) -> int:
        """HTTP status of the answer."""
        return 206 if self.is_range else 200


def select_range(request: S3Request, obj: RemoteObject) -> Selection:
    """Return the selection of a request for an object or for a range.

    Raises S3Error for a range beyond the object's end, and if a condition of the request, such as
    If-Match, is not met.
    """
    modified_s = stored_at_s(obj)
    check_conditions(request, obj.version, modified_s)
    range_header = applicable_range(request, obj.version, modified_s)
    span = parse_range(range_header, obj.size_bytes)
    return select_span(obj, span, object_headers(request, obj))


def select_span(obj: RemoteObject, span: Span | None, headers: dict[str, str]) -> Selection:
    """Return a selection of an object's bytes.

    Args:
        span: start and end of the bytes; None for the whole object.
        headers: headers of the answer; `Content-Range` is added for a range.
    """
    if span is None:
        return Selection(obj, (0, obj.size_bytes), is_range=False, headers=headers)
    start, end = span
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{obj.size_bytes}"
    return Selection(obj, span, is_range=True, headers=headers)


def object_headers(request: S3Request, obj: RemoteObject) -> dict[str, str]:
    """Return the headers that describe an object; the request's parameters may set some of them.

    Raises S3Error for a parameter that cannot be a header's value.
    """
    headers = {
        "ETag": f'"{obj.version}"',
        "Last-Modified": _http_date(int(stored_at_s(obj))),
        "Accept-Ranges": "bytes",
        "Content-Type": "binary/octet-stream",
    }
    if not request.params:  # as in most requests
        return headers
    for name, header in _HEADER_OF_PARAM.items():
        if name in request.params:
            headers[header] = _checked_header(request.params[name])
    return headers


def _checked_header(text: str) -> str:
    """Return a text unchanged. Raises S3Error if it cannot be the value of a header."""
    if not text.isprintable() or not text.isascii():
        raise S3Error("InvalidArgument", "a header of the answer has to be printable ASCII")
    return text


def stored_at_s(obj: RemoteObject) -> float:
    """Return the time at which an object was stored; 0, the Unix epoch, if it is not known."""
    return obj.modified_s or 0.0


@lru_cache(1024)
def _http_date(seconds: int) -> str:
    """Return a time in seconds since the Unix epoch in the form of HTTP headers."""
    return formatdate(seconds, usegmt=True)
