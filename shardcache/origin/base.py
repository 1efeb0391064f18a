"""Interface between the cache and its origins.

An origin is a place that shards are fetched from: an object store, a web server or a filesystem.
`registry` creates one `Origin` per protocol and `[[origin]]` table of the config, and the package
`fetch` calls the methods of the `Origin`. A session is a client's connection to the daemon. A part
is the unit in which an object is requested, checksummed and recorded. The tier is an optional cache
that the nodes of a cluster share; requests to the tier go through this node's nginx.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardcache.access.rules import AllowList
from shardcache.config.origin_table import OriginTable
from shardcache.origin.accepted_signatures import Signatures
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.session_credentials import SessionCredentials
from shardcache.origin.tier.tier_state import Route, TierState
from shardcache.shared.credentials.handed_credentials import Credentials
from shardcache.shared.exceptions import ConfigError
from shardcache.transport.between.checksums import Data
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import Parts, PartSums, write_parts
from shardcache.transport.worker_pool import Workers

WRITABLE_REMEDY = "write to a folder, s3://, or another object store"
"""Remedy for a url that nothing can be written to."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Argument of every origin's constructor.

    Attributes:
        protocol: the part of the origin's urls before `://`.
        table: the `[[origin]]` table with the options for these urls.
        max_connections: maximum number of connections that the origin opens itself. The connections
            of `workers` do not count: the caller limits those.
        redirect_guard: rules that the target of a redirect must satisfy; None for a process that
            reads with its own user's rights, which needs no such rules.
        workers: processes that send requests and write bodies to files.
        session_credentials: credentials that all sessions have handed over to a private daemon.
            `PermittedOrigin` opens one origin for each of them.
        signatures: signed urls that were accepted lately.
        credentials: the only credentials that the origin reads with, which are those of one
            session; None to read with the daemon's own.
    """

    protocol: str
    table: OriginTable
    max_connections: int
    redirect_guard: AllowList | None
    workers: Workers
    session_credentials: SessionCredentials = field(default_factory=lambda: SessionCredentials({}))
    signatures: Signatures = field(default_factory=Signatures)
    credentials: Credentials | None = None


class Origin(Protocol):
    """Remote place that shards come from.

    Every method raises only the errors of `shared/exceptions.py`. No method retries or sets a
    timeout: the caller does both. `fetch` and `list_prefix` report progress, by which the caller
    notices a stall.

    Attributes:
        tier: state of the cluster's shared cache in front of the origin; None if there is none.
    """

    tier: TierState | None = None

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """Return the object's current version.

        Args:
            first_bytes: number of the object's first bytes that the caller fetches next; an origin
                may request these bytes at the same time. 0 if the caller fetches none.

        Raises NotFoundError, AccessDeniedError, OriginUnavailableError.
        """

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """Write parts of exactly this version into their file; return each part's checksums.

        Args:
            parts: the file and its parts to fetch: one part, or several if the object is
                `is_joinable`, or all parts of the object if not `has_ranges`.
            flow: counts the bytes as they arrive, and pauses the read.
            commit: called when all bytes have arrived, before any is written; if it returns False,
                nothing is written, and the result is None. Without it, bytes are written as they
                arrive.

        Raises ShardChangedError when the origin now holds another version; OriginUnavailableError
        when a retry may help, including after short or mislabelled answers; PartFileError when the
        file cannot be written.
        """

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """Return every object whose url starts with `prefix`, at any depth, sorted by url.

        The list may be empty.

        Args:
            received: called with the number of objects that each page lists, not with bytes.
            flat: True to list only the objects without another "/" after the prefix, and the
                folders of the others. A folder's url ends in "/"; its version is empty and its size
                is 0.

        Raises the errors of `stat`.
        """

    async def list_page(self, wanted: PageRequest) -> ListedPage:
        """Return one page of a listing.

        Raises the errors of `list_prefix`, and ConfigError if urls of this kind cannot be listed by
        pages.
        """
        raise ConfigError(
            "this kind of url cannot be listed by pages",
            url=wanted.prefix,
            remedy="list it with: shardcache ls",
        )

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """Return the range `[start, stop)` of bytes of one part of an object's multipart upload.

        These are not the parts that the cache fetches. An object that was not uploaded in parts has
        one part, which is the whole object. Returns None if there is no such part.

        Args:
            number: number of the part; 1 for the first.

        Raises the errors of `stat`.
        """
        return (0, obj.size_bytes) if number == 1 else None

    async def close(self) -> None:
        """Close connections."""

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """Return the tier's answer to a request for parts.

        If the answer has `sums`, the parts have been written into their file. Returns None, without
        a request, if this object's parts must bypass the tier.

        Args:
            route: address of the tier, and the headers by which it handles the request.
            flow: counts and pauses the bytes, as for `fetch`; None if the request asks about the
                parts, and no body is to be written (see `Route.question`).

        Raises what `fetch` raises when the connection fails.
        """
        return None

    async def ask_tier_for_version(self, route: Route, url: str) -> RemoteObject | None:
        """Ask the tier which version the store lately permitted it to serve.

        Returns None if the tier knows no version, or must not be asked about this url.

        Raises what `fetch` raises when the connection fails.
        """
        return None

    async def obtain_credentials(self, url: str) -> str:
        """Obtain the credentials for a url, and return their source as text; empty if unknown.

        Raises the errors of `stat`.
        """
        return ""

    async def prepare(self, url: str) -> None:
        """Obtain the credentials and the connections that the first requests need.

        Raises the errors of `stat`.
        """
        # The first read sends a HEAD and a GET at the same time, so it needs two connections. Two
        # requests at the same time open two.
        await asyncio.gather(self.stat(url), self.stat(url))

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """Store a file under `url`, whole or not at all, and return the object.

        An origin on the same filesystem may move the file instead of copying it.

        Args:
            path: the local file.
            replaced: the version that the upload replaces, or "" if there must be no object under
                `url`. None for no check. Only S3 makes the check, as it stores the file.

        Raises the errors of `stat`, ShardChangedError for another version than `replaced`, and
        ConfigError if urls of this kind can only be read. After OriginUnavailableError, a retry may
        help.
        """
        raise ConfigError("this kind of url can only be read", url=url, remedy=WRITABLE_REMEDY)


async def commit_parts(parts: Parts, body: Data, commit: Commit | None) -> list[PartSums] | None:
    """Write the bytes of parts that are in memory; return each part's checksums.

    This is the last step of `Origin.fetch` for an origin that reads a whole body into memory.

    Args:
        body: all bytes of the parts.
        commit: as in `Origin.fetch`; the result is None if it returns False.
    """
    if commit is not None and not await commit():
        return None
    return await asyncio.to_thread(write_parts, parts, body)
