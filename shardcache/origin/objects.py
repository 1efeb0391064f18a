"""Objects as their origins state them: versions, sizes and checksums."""

import base64
import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from shardcache.errors import CorruptShardError, OriginUnavailableError

MD5 = "md5"
SHA256 = "sha256"
GIT_BLOB = "git blob"

DIGESTS = frozenset({SHA256, GIT_BLOB})
"""Algorithms whose checksum of an object cannot be combined from the checksums of its parts."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum of a whole object, as reported by its origin.

    Attributes:
        algorithm: one of `checksums.ALGORITHMS` or `DIGESTS`; or `MD5`, which is only presumed, as
            an ETag does not say that it is one.
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


def checksum_in(algorithm: str, stated: str, url: str) -> Checksum:
    """Return the checksum that a header states in Base64.

    Raises OriginUnavailableError for anything else.
    """
    try:
        value = base64.b64decode(stated, validate=True)
    except ValueError as exn:  # also of characters beyond ASCII
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
        hashlib.file_digest(file, lambda: digest)  # updates it with the file's bytes
    return int.from_bytes(digest.digest(), "big")


def digest_of_bytes(data: bytes, algorithm: str) -> int:
    """As `digest_of`, of bytes in memory."""
    digest = _new_digest(algorithm, len(data))
    digest.update(data)
    return int.from_bytes(digest.digest(), "big")


def _new_digest(algorithm: str, size_bytes: int) -> "hashlib._Hash":
    """Return a digest for an object of a size, to be updated with all of its bytes."""
    if algorithm == GIT_BLOB:  # git hashes a header before the bytes
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return hashlib.new(algorithm, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One version of one object.

    Attributes:
        version: ETag or its substitute; two reads of one version return the same bytes.
        ranges: True if the origin answers ranged reads of one version; otherwise the object comes
            as one stream.
        guarded: True if every read detects that the origin holds another version; otherwise the
            version has to be checked again after the last read.
        joinable: True if one read may fetch several parts, because its bytes are written as they
            arrive; otherwise all of them are in memory at once.
        reported_s: time by the monotonic clock at which the origin reported this version.
        modified_s: when it was stored, in seconds since the Unix epoch; None if that is not known.
    """

    url: str
    version: str
    size_bytes: int
    checksum: Checksum | None = field(default=None, compare=False)
    ranges: bool = True
    guarded: bool = field(default=True, compare=False)
    joinable: bool = field(default=False, compare=False)
    reported_s: float = field(default_factory=time.monotonic, compare=False, repr=False)
    modified_s: float | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ListedPage:
    """One page of a listing, in the order of the keys.

    Attributes:
        objects: the objects.
        folders: common beginnings of urls, up to the delimiter.
        next_token: token of the request for the next page; empty if this is the last one.
    """

    objects: list[RemoteObject]
    folders: list[str]
    next_token: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Request for a page of a listing.

    Attributes:
        prefix: of the urls.
        delimiter: urls that have it after the prefix are shown as their folder; empty for none.
        after: key after which the first page begins; empty for the first key.
        token: of the page before; empty for the first page.
        max_keys: maximum number of objects and folders.
    """

    prefix: str
    delimiter: str = ""
    after: str = ""
    token: str = ""
    max_keys: int = 1000
