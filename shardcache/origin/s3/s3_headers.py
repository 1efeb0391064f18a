"""Versions and checksums of S3's objects, as headers of answers state them.

S3 states checksums of whole objects, and composites: checksums of the checksums of the parts in
which an object was uploaded. Only the former can be compared with the received bytes.
"""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from shardcache.origin.http.http_semantics import no_version, plain_etag, span_in
from shardcache.origin.objects import MD5, Checksum, RemoteObject, checksum_from_base64
from shardcache.transport.http.http_heads import SENDABLE

Headers = Mapping[str, str]
"""Headers of an answer, by name in lower case."""

_CHECKSUMS = ("crc32c", "crc64nvme", "crc32")


def etag_in(field: str | None, url: str) -> str:
    """Return the version in an ETag header, as `plain_etag` does.

    Raises OriginUnavailableError if there is no ETag, or if it has characters that a later request
    cannot send back.
    """
    etag = plain_etag(field or "")
    if not SENDABLE.fullmatch(etag):
        raise no_version(url)
    return etag


def checksum_of(head: Headers, url: str) -> Checksum | None:
    """Return the checksum of the whole object.

    Returns None if S3 states no checksum, or states one that is or may be a composite.
    """
    was_in_parts = "-" in head["etag"]  # such an ETag ends with a dash and the number of parts
    presumed_type = "COMPOSITE" if was_in_parts else "FULL_OBJECT"
    if head.get("x-amz-checksum-type", presumed_type) != "FULL_OBJECT":
        return None
    for algorithm in _CHECKSUMS:
        value = head.get(f"x-amz-checksum-{algorithm}", "")
        is_composite = "-" in value
        if value and not is_composite:
            return checksum_from_base64(algorithm, value, url)
    return None


def presumed_md5(head: Headers) -> Checksum | None:
    """Return the ETag as an MD5; None if the headers show that it is not one.

    See "Object" in the S3 API reference. The ETag is an MD5 if the object was neither uploaded in
    parts, which the ETag's form would show, nor encrypted with a KMS or customer key. In a
    directory bucket, an ETag is never an MD5.
    """
    if "x-amz-server-side-encryption-customer-algorithm" in head:
        return None
    if head.get("x-amz-server-side-encryption", "AES256") != "AES256":
        return None
    if head.get("x-amz-storage-class") == "EXPRESS_ONEZONE":
        return None

    etag = plain_etag(head["etag"])
    if not re.fullmatch("[0-9a-f]{32}", etag):
        return None
    return Checksum(MD5, int(etag, 16))


def modified_s(field: str | None) -> float | None:
    """Return the time in Last-Modified, in seconds since the Unix epoch.

    Returns None if there is no valid time, which is not an error: clients only show this time.
    """
    if field is None:
        return None
    try:
        return parsedate_to_datetime(field).timestamp()
    except (ValueError, OverflowError):
        return None


def part_in(head: Headers, obj: RemoteObject, number: int) -> tuple[int, int] | None:
    """Return the range `[start, stop)` of an uploaded part, from the answer to a HEAD for the part.

    Returns None if the object has no such part. A store that does not support part numbers answers
    for the whole object, which then counts as the first part.

    Args:
        number: number of the part; 1 for the first.
    """
    span = span_in(head.get("content-range"))
    if span is not None:
        return span
    return (0, obj.size_bytes) if number == 1 else None
