"""Interface between the cache and its origins."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardcache.access.rules import AllowList
from shardcache.config.origin_table import OriginTable
from shardcache.errors import ConfigError
from shardcache.origin.handed import Handed
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.signatures import Signatures
from shardcache.origin.tier.tier_state import Route, TierState
from shardcache.shared.credentials.handed_credentials import Credentials
from shardcache.transport.between.checksums import Data
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import Parts, PartSums, write_parts
from shardcache.transport.worker_pool import Workers

WRITABLE = "write to a folder, s3://, or another object store"
"""Remedy for a url that nothing can be written to."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Argument of every origin's constructor.

    Attributes:
        protocol: the part of its urls before `://`.
        table: options for its urls.
        max_connections: limit on the connections that the origin opens itself; the caller limits
            those of `workers`.
        redirect_guard: None for a process that reads with its own user's rights.
        workers: send requests, and write bodies to files.
        handed: credentials of this user's sessions, which go before those of the environment.
        signatures: signed urls that were accepted lately.
        credentials: a session's, the only ones to read with; None for the daemon's own.
    """

    protocol: str
    table: OriginTable
    max_connections: int
    redirect_guard: AllowList | None
    workers: Workers
    handed: Handed = field(default_factory=lambda: Handed({}))
    signatures: Signatures = field(default_factory=Signatures)
    credentials: Credentials | None = None


class Origin(Protocol):
    """Remote place that shards come from.

    Every method raises only the errors of `shardcache.errors`. Retries and timeouts are up to the
    caller, which is told of all bytes as they arrive.

    Attributes:
        tier: the cluster's shared cache in front of it, if any.
    """

    tier: TierState | None = None

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """Return the object's current version.

        Args:
            first_bytes: number of the object's first bytes that are to be fetched next: they may be
                requested at the same time.

        Raises NotFoundError, AccessDeniedError, OriginUnavailableError.
        """

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """Write bytes of exactly this version into their file; return each part's checksums.

        Args:
            parts: one part; several if the object is `joinable`; all of them if it has no `ranges`.
            commit: called when all bytes have arrived, before any is written; if it returns False,
                nothing is written, and the result is None.

        Raises ShardChangedError when the origin now holds another version; OriginUnavailableError
        when a retry may help, including after short or mislabelled answers; PartFileError.
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
            received: called with numbers of objects, not bytes.
            flat: True for only those up to the next "/", and folders: urls that end in "/", of no
                version and size.
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
        """Return start and end of a part that an object was uploaded in; None if there is none.

        Args:
            number: 1 for the first part.

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
        """Return the tier's answer to a request for parts, which are then in their file.

        None, and nothing requested, if this object's parts must bypass the tier.

        Args:
            flow: None if no part is expected.

        Raises what `fetch` raises when the connection fails.
        """
        return None

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """Return the version that the tier was permitted to serve lately; None if it knows none.

        Raises what `fetch` raises when the connection fails.
        """
        return None

    async def credentials(self, url: str) -> str:
        """Obtain the credentials for a url, and return their kind; empty if unknown.

        Raises the errors of `stat`.
        """
        return ""

    async def prepare(self, url: str) -> None:
        """Obtain what the first requests need: credentials, and connections for a HEAD and a GET.

        Raises the errors of `stat`.
        """
        await asyncio.gather(self.stat(url), self.stat(url))

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """Store a file under `url`, whole or not at all, and return the object.

        The file may be moved there.

        Args:
            replaced: the version that the upload replaces, or "" if there must be no object: S3
                checks it. None for no check.

        Raises the errors of `stat`, ShardChangedError for another version than `replaced`, and
        ConfigError if urls of this kind can only be read. After OriginUnavailableError, a retry may
        help.
        """
        raise ConfigError("this kind of url can only be read", url=url, remedy=WRITABLE)


async def commit_parts(parts: Parts, body: Data, commit: Commit | None) -> list[PartSums] | None:
    """Write bytes that are in memory, as `Origin.fetch` does with those that arrive."""
    if commit is not None and not await commit():
        return None
    return await asyncio.to_thread(write_parts, parts, body)
