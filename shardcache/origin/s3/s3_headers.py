"""Versions and checksums of S3's objects, as headers of answers state them."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from shardcache.origin.http.http_semantics import no_version, span_in
from shardcache.origin.objects import MD5, Checksum, RemoteObject, checksum_in
from shardcache.transport.http.http_heads import ECHOED

Headers = Mapping[str, str]
"""Headers of an answer; names in lower case."""

_CHECKSUMS = ("crc32c", "crc64nvme", "crc32")


def etag_in(field: str | None, url: str) -> str:
    """Return an ETag without its quotes.

    Raises OriginUnavailableError for one that cannot be sent back.
    """
    etag = (field or "").strip('"')
    if not ECHOED.fullmatch(etag):
        raise no_version(url)
    return etag


def checksum_of(head: Headers, url: str) -> Checksum | None:
    """Return the object's checksum.

    None if it is, or may be, a composite of its uploaded parts' checksums.
    """
    was_in_parts = "-" in head["etag"]
    presumed_type = "COMPOSITE" if was_in_parts else "FULL_OBJECT"
    if head.get("x-amz-checksum-type", presumed_type) != "FULL_OBJECT":
        return None
    for algorithm in _CHECKSUMS:
        value = head.get(f"x-amz-checksum-{algorithm}", "")
        if value and "-" not in value:
            return checksum_in(algorithm, value, url)
    return None


def presumed_md5(head: Headers) -> Checksum | None:
    """Return the ETag as an MD5, unless the headers rule that out.

    See "Object" in the S3 API reference: the ETag is an MD5 if the object was neither uploaded in
    parts, which shows in its form, nor encrypted with a KMS or customer key; in a directory bucket
    it never is.
    """
    if "x-amz-server-side-encryption-customer-algorithm" in head:
        return None
    if head.get("x-amz-server-side-encryption", "AES256") != "AES256":
        return None
    if head.get("x-amz-storage-class") == "EXPRESS_ONEZONE":
        return None

    etag = head["etag"].strip('"')
    if not re.fullmatch("[0-9a-f]{32}", etag):
        return None
    return Checksum(MD5, int(etag, 16))


def modified_s(field: str | None) -> float | None:
    """Return the time in Last-Modified, in seconds since the Unix epoch; None without a valid one.

    It is only shown by clients.
    """
    if field is None:
        return None
    try:
        return parsedate_to_datetime(field).timestamp()
    except (ValueError, OverflowError):
        return None


def part_in(head: Headers, obj: RemoteObject, number: int) -> tuple[int, int] | None:
    """Return start and end of a part, from the answer to a HEAD with its number.

    None if the object has no such part. A store that does not support part numbers describes the
    whole object.
    """
    span = span_in(head.get("content-range"))
    if span is not None:
        return span
    return (0, obj.size_bytes) if number == 1 else None
