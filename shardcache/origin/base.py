"""Interface between the cache and its origins."""

import asyncio
import base64
import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardcache.access import AllowList
from shardcache.config import OriginTable
from shardcache.errors import ConfigError, CorruptShardError, OriginUnavailableError
from shardcache.transport.messages import Answer
from shardcache.transport.parts import ALGORITHMS, Data, Parts, PartSums, combined, write_parts
from shardcache.transport.workers import Commit, Flow, Received, Workers

MD5 = "md5"
SHA256 = "sha256"
GIT_BLOB = "git blob"
DIGESTS = frozenset({SHA256, GIT_BLOB})
"""Algorithms of checksums that an origin states of a whole object, and that cannot be made of those of its parts."""

_READ_BYTES = 4 * 1024**2

OWNER = "x-shardcache-owner"
"""Header of a question about a part's owner in the tier, and of the answer, with the owner's address."""

PRESIGNED_OPTIONS = frozenset({"key", "secret", "token", "endpoint_url", "anon", "use_ssl"})
"""Keys of `storage_options` that presigned urls support; with others, the S3 SDK has to make every request."""

WRITABLE = "write to a folder, s3://, or another object store"
"""Remedy for a url that nothing can be written to."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksum of a whole object, as reported by its origin."""

    algorithm: str  # one of `ALGORITHMS` or `DIGESTS`, or `MD5`, which is presumed: an ETag does not say it
    value: int  # unsigned

    def check(self, found: int, url: str) -> None:
        """Raise CorruptShardError if another checksum was found."""
        if found != self.value:
            raise CorruptShardError(
                f"the {self.algorithm} of the received bytes is {found:x}, the origin's is {self.value:x}", url=url
            )


def checksum_in(algorithm: str, stated: str, url: str) -> Checksum:
    """Return the checksum that a header states in Base64. Raises OriginUnavailableError for anything else."""
    try:
        value = base64.b64decode(stated, validate=True)
    except ValueError as exn:  # also of characters beyond ASCII
        raise OriginUnavailableError(
            f"the origin states {stated!r} as {algorithm}, which is no Base64", url=url
        ) from exn
    return Checksum(algorithm, int.from_bytes(value, "big"))


def digest_of(path: Path, algorithm: str) -> int:
    """Return the MD5 of a file, or its checksum by one of `DIGESTS`. Blocks. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        begun = _digest(algorithm, os.fstat(file.fileno()).st_size)
        digest = hashlib.file_digest(file, lambda: begun)
    return int.from_bytes(digest.digest(), "big")


def _digest_of_bytes(data: bytes, algorithm: str) -> int:
    digest = _digest(algorithm, len(data))
    digest.update(data)
    return int.from_bytes(digest.digest(), "big")


def _digest(algorithm: str, size_bytes: int) -> "hashlib._Hash":
    if algorithm == GIT_BLOB:
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    return hashlib.new(algorithm, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One version of one object.

    Attributes:
        version: ETag or its substitute; two reads of one version return the same bytes.
        ranges: True if the origin answers ranged reads of one version; otherwise the object comes as one stream.
        guarded: True if every read detects that the origin holds another version; otherwise the version has to be
            checked again after the last read.
        joinable: True if one read may fetch several parts, because its bytes are written as they arrive; otherwise all
            of them are in memory at once.
        reported_s: when the origin reported this, by the monotonic clock.
    """

    url: str
    version: str
    size_bytes: int
    checksum: Checksum | None = field(default=None, compare=False)
    ranges: bool = True
    guarded: bool = field(default=True, compare=False)
    joinable: bool = field(default=False, compare=False)
    reported_s: float = field(default_factory=time.monotonic, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """Argument of every origin's constructor."""

    protocol: str  # the part of its urls before `://`
    table: OriginTable  # options for its urls
    max_connections: int  # of its own; those of `workers` are limited by the caller
    redirect_guard: AllowList | None  # None for a process that reads with its own user's rights
    workers: Workers


@dataclass(frozen=True, slots=True)
class Route:
    """Address and headers of one request to the tier, the cluster's shared cache in front of an origin."""

    address: str  # path of the socket to connect to
    refreshes: bool = False  # fetches the part past the tier's cache, and replaces what it has cached
    detours: bool = False  # leads to another owner
    question: str = ""  # "name" or "alive": asks about the owner, in place of the parts; empty for the parts
    asks_version: bool = False  # asks which version of the object the store permitted lately, in place of the parts

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to send in addition to the origin's."""
        headers = {"X-Shardcache-Fresh": "1"} if self.refreshes else {}
        headers |= {"X-Shardcache-Detour": "1"} if self.detours else {}
        headers |= {"X-Shardcache-Version": "asked"} if self.asks_version else {}
        return headers | ({OWNER: self.question} if self.question else {})


class Origin(Protocol):
    """Remote place that shards come from. Every method raises only the errors of `shardcache.errors`.

    Retries and timeouts are up to the caller, to whom every chunk is reported.
    """

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """Return the object's current version. Raises NotFoundError, AccessDeniedError, OriginUnavailableError.

        The object's `first_bytes`, which are to be fetched next, may be requested at the same time.
        """

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """Write bytes of exactly this version into their file, and return the checksums of each part.

        Args:
            parts: one part; several if the object is `joinable`; all of them if it has no `ranges`.
            commit: called when all bytes have arrived and none is written; if it returns False, none will be, and the
                result is None.

        Raises ShardChangedError when the origin now holds another version; OriginUnavailableError when a retry may
        help, including after short or mislabelled answers; PartFileError.
        """

    async def list_prefix(self, prefix: str, received: Received, *, flat: bool = False) -> list[RemoteObject]:
        """Return every object, at any depth, whose url starts with `prefix`, sorted by url; the list may be empty.

        With `flat`, only those up to the next "/", and folders: urls that end in "/", of no version and size.
        `received` is called with numbers of objects, not bytes.
        """

    async def close(self) -> None:
        """Close connections."""

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """Return the tier's answer to a request for parts, which are then in their file.

        None, and nothing requested, if this object's parts must bypass the tier; `flow` is None if no part is expected.
        Raises what `fetch` raises when the connection fails.
        """
        return None

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """Return the version that the tier was permitted to serve lately; None if it knows none.

        Raises what `fetch` raises when the connection fails.
        """
        return None

    async def credentials(self, url: str) -> str:
        """Obtain the credentials for a url, and return their kind; empty if unknown. Raises the errors of `stat`."""
        return ""

    async def prepare(self, url: str) -> None:
        """Obtain what the first requests need: credentials, and connections for a HEAD and a GET.

        Raises the errors of `stat`.
        """
        await asyncio.gather(self.stat(url), self.stat(url))

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """Store a file under `url`, whole or not at all, and return the object; the file may be moved there.

        With `replaced`, the version that is there, or "" for none, S3 checks that it still is.

        Raises the errors of `stat`, ShardChangedError for another version than `replaced`, and ConfigError if urls of
        this kind can only be read; with OriginUnavailableError, a retry may help.
        """
        raise ConfigError("this kind of url can only be read", url=url, remedy=WRITABLE)


async def commit_parts(parts: Parts, body: Data, commit: Commit | None) -> list[PartSums] | None:
    """Write bytes that are in memory, as `Origin.fetch` does with those that arrive."""
    if commit is not None and not await commit():
        return None
    return await asyncio.to_thread(write_parts, parts, body)


async def read_object(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    """Return all bytes of a small object, compared with its checksum, unless that is presumed.

    Raises what `Origin.fetch` does; CorruptShardError if other bytes have arrived twice.
    """
    try:
        return await _read_once(origin, obj, flow)
    except CorruptShardError:  # a second request cures what was damaged on the way
        return await _read_once(origin, obj, flow)


async def _read_once(origin: Origin, obj: RemoteObject, flow: Flow) -> bytes:
    fd = os.memfd_create("shardcache-object")
    try:
        step_bytes = _READ_BYTES if obj.ranges else max(1, obj.size_bytes)
        algorithm = obj.checksum.algorithm if obj.checksum and obj.checksum.algorithm in ALGORITHMS else None
        sums: list[PartSums] = []
        for start in range(0, obj.size_bytes, step_bytes):
            size_bytes = min(step_bytes, obj.size_bytes - start)
            parts = Parts("", None, step_bytes, start, size_bytes, algorithm, fd)
            sums += await origin.fetch(obj, parts, flow) or ()

        if obj.checksum is not None and algorithm is not None:
            checksums = [each.checksum for each in sums]
            obj.checksum.check(combined(algorithm, checksums, step_bytes, obj.size_bytes), obj.url)

        data = await asyncio.to_thread(os.pread, fd, obj.size_bytes, 0)
        if obj.checksum is not None and obj.checksum.algorithm in DIGESTS:
            found = await asyncio.to_thread(_digest_of_bytes, data, obj.checksum.algorithm)
            obj.checksum.check(found, obj.url)
        return data
    finally:
        os.close(fd)
