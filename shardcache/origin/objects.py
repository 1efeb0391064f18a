"""Objects as their origins state them: versions, sizes and checksums.

Every origin returns these types, and the cache, the listings and the S3 endpoint use them. A
version is an object's ETag, or another text that changes whenever the object's bytes change. A part
is the unit in which the cache requests an object. A key is an object's name in its bucket, which
ends the object's url.
"""

import base64
import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from shardcache.shared.exceptions import CorruptShardError, OriginUnavailableError

# Names of algorithms. A git blob's checksum is the SHA-1 of a header and the object's bytes.
MD5 = "md5"
SHA256 = "sha256"
GIT_BLOB = "git blob"

DIGESTS = frozenset({SHA256, GIT_BLOB})
"""Algorithms whose checksum of an object cannot be combined from the checksums of its parts."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum of a whole object, as reported by its origin.

    Attributes:
        algorithm: one of `checksums.ALGORITHMS` or `DIGESTS`; or `MD5`. An MD5 may come from an
            ETag, which does not say whether it is one.
        value: the checksum as an unsigned integer.
    """

    algorithm: str
    value: int

    def check(self, computed: int, url: str) -> None:
        """Raise CorruptShardError if the received bytes have another checksum."""
        if computed != self.value:
            received = f"the {self.algorithm} of the received bytes is {computed:x}"
            stated = f"the origin's is {self.value:x}"
            raise CorruptShardError(f"{received}, {stated}", url=url)


def checksum_from_base64(algorithm: str, stated: str, url: str) -> Checksum:
    """Return the checksum that a header states in Base64.

    Args:
        algorithm: name of the checksum's algorithm.
        stated: the header's value.
        url: the object's url, for the error.

    Raises OriginUnavailableError for a value that is not Base64.
    """
    try:
        value = base64.b64decode(stated, validate=True)
    except ValueError as exn:  # also raised for characters beyond ASCII
        raise OriginUnavailableError(
            f"the origin states {stated!r} as {algorithm}, which is not Base64",
            url=url,
        ) from exn
    return Checksum(algorithm, int.from_bytes(value, "big"))


def digest_of(path: Path, algorithm: str) -> int:
    """Return the MD5 of a file, or its checksum by one of `DIGESTS`. Blocks. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        digest = _new_digest(algorithm, size_bytes)
        # `file_digest` takes a function that returns the digest to update with the file's bytes.
        hashlib.file_digest(file, lambda: digest)
    return int.from_bytes(digest.digest(), "big")


def digest_of_bytes(data: bytes, algorithm: str) -> int:
    """Return the checksum of bytes in memory, as `digest_of` does for a file."""
    digest = _new_digest(algorithm, len(data))
    digest.update(data)
    return int.from_bytes(digest.digest(), "big")


def _new_digest(algorithm: str, size_bytes: int) -> "hashlib._Hash":
    """Return a new digest, which the caller updates with all bytes of the object.

    Args:
        size_bytes: size of the object.
    """
    if algorithm == GIT_BLOB:  # git hashes a header with the size before the bytes
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return hashlib.new(algorithm, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One version of one object.

    Attributes:
        version: ETag or its substitute; two reads of one version return the same bytes.
        checksum: checksum of the whole object; None if the origin states none.
        has_ranges: True if the origin supports ranged reads; otherwise the whole object is fetched
            as one stream.
        is_guarded: True if every read fails once the origin holds another version; otherwise the
            version has to be checked again after the last read.
        is_joinable: True if one read may fetch several parts, because their bytes are written as
            they arrive. Otherwise all bytes of a read are in memory at once, so a read is one part.
        reported_s: time by the monotonic clock at which the origin reported this version.
        modified_s: time at which the object was stored, in seconds since the Unix epoch; None if
            the origin does not state it.
    """

    url: str
    version: str
    size_bytes: int
    checksum: Checksum | None = field(default=None, compare=False)
    has_ranges: bool = True
    is_guarded: bool = field(default=True, compare=False)
    is_joinable: bool = field(default=False, compare=False)
    reported_s: float = field(default_factory=time.monotonic, compare=False, repr=False)
    modified_s: float | None = field(default=None, compare=False, repr=False)

    @property
    def is_divisible(self) -> bool:
        """True if parts that are fetched at different times are sure to be of one version."""
        return self.has_ranges and self.is_guarded


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page of a listing, in the order of the keys.

    Attributes:
        objects: the page's objects.
        folders: the page's folders. A folder is the beginning, up to the delimiter, of all urls
            that are listed as one: see `PageRequest.delimiter`.
        next_token: token of the request for the next page; empty if this is the last page.
    """

    objects: list[RemoteObject]
    folders: list[str]
    next_token: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Request for a page of a listing.

    Attributes:
        prefix: beginning of the urls to list.
        delimiter: urls with this text after the prefix are listed as one folder; empty to list
            every url.
        after: key after which the first page begins; empty to begin with the first key.
        token: `next_token` of the previous page; empty for the first page.
        max_keys: maximum number of objects and folders on the page.
    """

    prefix: str
    delimiter: str = ""
    after: str = ""
    token: str = ""
    max_keys: int = 1000
