"""Object stores, read with any of a user's credentials."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginError,
    OriginUnavailableError,
)
from shardcache.origin.base import Origin, Setup
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.tier.tier_state import Route
from shardcache.shared.credentials.handed_credentials import Credentials
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import Parts, PartSums

_MAX_BUCKETS = 10_000  # of which it is remembered with which credentials they are read
_Result = TypeVar("_Result")


class CredentialedOrigin(Origin):
    """An object store that is read with one set of credentials.

    Those of its `Setup`; else the table's; else what the store's package finds.

    Attributes:
        handed: kind of the credentials that sessions hand over.
        secrets: options of a table for credentials. With one of them, sessions' are not used.
    """

    handed: ClassVar[type[Credentials]]
    secrets: ClassVar[frozenset[str]] = frozenset({"token"})

    def __init__(self, setup: Setup) -> None:
        """Raises ImportError; AccessDeniedError or ConfigError for credentials without use."""

    @staticmethod
    def bucket(url: str) -> str:
        """Return the part of a url that one permission usually covers."""
        return url.partition("://")[2].partition("/")[0]

    def lacks(self, url: str) -> bool:
        """Return whether a NotFoundError for a url is final: other credentials find no more."""
        return True


_Opened = CredentialedOrigin | AccessDeniedError | ConfigError
"""An origin, or the error for credentials with which it cannot be opened."""


class PermittedOrigin(Origin):
    """A store, by the daemon's own credentials and by those that sessions have handed over.

    There is one origin for each of them. A bucket is read with the first that may read it, which is
    remembered until it is refused. A refusal must not reach the job whose credentials have the
    permission, so it is raised after all have been refused. With a table's own credentials, or
    `anon`, there are no others.

    Attributes:
        store: class of the origins.
    """

    store: ClassVar[type[CredentialedOrigin]]

    def __init__(self, setup: Setup) -> None:
        """Open the origin with the daemon's own credentials. Raises ImportError."""
        self._setup = setup
        table = setup.table
        has_own = not self.store.secrets.isdisjoint(table.storage_options)
        self._is_shared = not (table.anon or table.profile or has_own)
        self._own = self._open(None)
        self._others: dict[Credentials, _Opened] = {}
        self._opening = asyncio.Lock()
        self._readers: dict[str, CredentialedOrigin] = {}  # by bucket

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`."""
        return await self._permitted(url, lambda origin: origin.stat(url, first_bytes))

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        return await self._permitted(
            obj.url,
            lambda origin: origin.fetch(obj, parts, flow, commit),
        )

    async def list_prefix(
        self,
        prefix: str,
        received: Received,
        *,
        flat: bool = False,
    ) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        return await self._permitted(
            prefix,
            lambda origin: origin.list_prefix(prefix, received, flat=flat),
        )

    async def list_page(self, wanted: PageRequest) -> ListedPage:
        """As `Origin.list_page`."""
        return await self._permitted(wanted.prefix, lambda origin: origin.list_page(wanted))

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """As `Origin.part_span`."""
        return await self._permitted(obj.url, lambda origin: origin.part_span(obj, number))

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """As `Origin.ask_tier`; with the credentials that may read the bucket."""
        origin = await self._likeliest(obj.url)
        return await origin.ask_tier(route, obj, parts, flow)

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.permitted_lately`; with the credentials that may read the bucket."""
        origin = await self._likeliest(url)
        return await origin.permitted_lately(route, url)

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`; of those that may read the bucket."""
        origin = await self._likeliest(url)
        return await origin.credentials(url)

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`; with the credentials that may read the bucket."""
        origin = await self._likeliest(url)
        await origin.prepare(url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`; with the own credentials alone."""
        return await _usable(self._own, url).upload(path, url, replaced)

    async def close(self) -> None:
        """As `Origin.close`."""
        for opened in (self._own, *self._others.values()):
            if isinstance(opened, CredentialedOrigin):
                await opened.close()

    async def _permitted(
        self,
        url: str,
        request: Callable[[CredentialedOrigin], Awaitable[_Result]],
    ) -> _Result:
        """Return what a request returns with the first credentials that the store permits it to.

        Raises the error of those that may read the bucket; if none may, of the newest.
        """
        candidates = await self._candidates(url)
        if len(candidates) == 1:  # of nearly all daemons; every part of a file passes here
            return await request(_usable(candidates[0], url))
        refusals: list[OriginError | ConfigError] = []
        for opened in candidates:
            try:
                origin = _usable(opened, url)
                result = await request(origin)
            except NotFoundError as exn:
                if origin.lacks(url):
                    self._remember(origin, url)
                    raise
                refusals.append(exn)
            except (AccessDeniedError, ConfigError) as exn:
                refusals.append(exn)
            except OriginUnavailableError as exn:
                if not exn.has_expired:
                    raise
                refusals.append(exn)
            else:
                self._remember(origin, url)
                return result
        self._readers.pop(self.store.bucket(url), None)
        raise refusals[0]

    async def _candidates(self, url: str) -> list[_Opened]:
        """Return the origins of all credentials; the one that has read from the bucket comes first.

        The others follow from the newest credentials to the daemon's own.
        """
        wanted = self._setup.handed.newest_first(self.store.handed) if self._is_shared else []
        if not wanted:
            return [self._own]
        if any(each not in self._others for each in wanted):
            await self._open_all()
        others = [self._others[each] for each in wanted if each in self._others]
        reader = self._readers.get(self.store.bucket(url))
        return sorted([*others, self._own], key=lambda opened: opened is not reader)

    async def _likeliest(self, url: str) -> CredentialedOrigin:
        """Return the origin that has read from the bucket, else that of the newest credentials."""
        first, *_ = await self._candidates(url)
        return _usable(first, url)

    def _remember(self, origin: CredentialedOrigin, url: str) -> None:
        """Note that an origin has read from the url's bucket."""
        if len(self._readers) >= _MAX_BUCKETS:
            self._readers.clear()
        self._readers[self.store.bucket(url)] = origin

    async def _open_all(self) -> None:
        """Open the origins of all credentials that were handed over.

        Those of credentials that are no longer kept end with their last requests.
        """
        async with self._opening:
            opened: dict[Credentials, _Opened] = {}
            for each in list(self._setup.handed.newest_first(self.store.handed)):
                if each in self._others:
                    opened[each] = self._others[each]
                else:
                    opened[each] = await asyncio.to_thread(self._open, each)
            self._others = opened

    def _open(self, credentials: Credentials | None) -> _Opened:
        """Open the origin with credentials; None for the daemon's own. Blocks.

        Raises ImportError.
        """
        try:
            return self.store(replace(self._setup, credentials=credentials))
        except (AccessDeniedError, ConfigError) as exn:
            return exn


def _usable(opened: _Opened, url: str) -> CredentialedOrigin:
    """Return an origin; raise the error of one that could not be opened."""
    if isinstance(opened, CredentialedOrigin):
        return opened
    raise type(opened)(opened.message, url=url, remedy=opened.remedy)
