"""Object stores that are read with whichever of a user's credentials has the permission."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
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

_MAX_BUCKETS = 10_000  # for which the credentials that read them are remembered
_MAX_FOLDERS = 1_000  # for which a refusal of some credentials is remembered
# Credentials that were refused in a folder are tried last for this time, as a refused `stat` costs
# three requests to S3. A permission that is granted meanwhile is used once this time is over, or
# earlier if no other credentials have it.
_REFUSED_S = 300.0
_EVERYWHERE = ""  # stands for all folders
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

    def not_found_is_final(self, url: str) -> bool:
        """Return whether a NotFoundError for a url is final: no other credentials could find it."""
        return True


_Opened = CredentialedOrigin | AccessDeniedError | ConfigError
"""An origin, or the error for credentials with which it cannot be opened."""


class _Candidate:
    """A store as one set of credentials reads it, opened when it is first used.

    Args:
        open_: opens it, and blocks.

    Attributes:
        is_retired: True once its credentials are no longer kept.
    """

    def __init__(self, open_: Callable[[], _Opened]) -> None:
        self._open = open_
        self._opened: _Opened | None = None
        self._opening = asyncio.Lock()
        self._users = 0  # requests that use it at present
        self.is_retired = False
        self._refused: dict[str, float] = {}  # by folder: when the store refused a request in it

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[CredentialedOrigin]:
        """Provide the origin for a request. Raises the error of one that could not be opened."""
        self._users += 1
        try:
            if self._opened is None:
                async with self._opening:
                    if self._opened is None:
                        self._opened = await asyncio.to_thread(self._open)
            opened = self._opened
            if not isinstance(opened, CredentialedOrigin):
                raise type(opened)(opened.message, url=url, remedy=opened.remedy)
            yield opened
        finally:
            self._users -= 1
            if self.is_retired and not self._users:
                await self.close()

    async def retire(self) -> None:
        """Close the origin after its last request."""
        self.is_retired = True
        if not self._users:
            await self.close()

    async def close(self) -> None:
        """Close the origin if it was opened."""
        if isinstance(self._opened, CredentialedOrigin):
            await self._opened.close()

    def is_refused(self, folder: str) -> bool:
        """Return whether the store refused a request in a folder lately."""
        if not self._refused:
            return False
        latest_s = max(self._refused.get(place, 0.0) for place in (folder, _EVERYWHERE))
        return latest_s > time.monotonic() - _REFUSED_S

    def refuse(self, folder: str) -> None:
        """Note that the store refused a request in a folder, or everywhere."""
        if len(self._refused) >= _MAX_FOLDERS:
            self._refused.clear()
        self._refused[folder] = time.monotonic()

    def permit(self, folder: str) -> None:
        """Note that the store permitted a request in a folder."""
        for place in (folder, _EVERYWHERE):
            self._refused.pop(place, None)


class PermittedOrigin(Origin):
    """A store, read with the daemon's own credentials and with those that sessions hand over.

    There is one origin for each of them. A refusal must not reach the job whose credentials have
    the permission, so it is raised only after all have been refused. If the table has credentials,
    or sets `anon`, those of sessions are not used.

    Attributes:
        store: class of the origins.
    """

    store: ClassVar[type[CredentialedOrigin]]

    def __init__(self, setup: Setup) -> None:
        """Open the origin with the daemon's own credentials. Raises ImportError."""
        self._setup = setup
        table = setup.table
        has_own = not self.store.secrets.isdisjoint(table.storage_options)
        self._uses_handed = not (table.anon or table.profile or has_own)
        opened = self._open(None)
        self._own = _Candidate(lambda: opened)
        self._others: dict[Credentials, _Candidate] = {}  # newest first
        self._successful: dict[str, _Candidate] = {}  # by bucket: the last one that has read it
        self._changes = 0  # value of `Handed.changes` when `_others` was updated

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`."""
        return await self._with_any(url, lambda origin: origin.stat(url, first_bytes))

    async def fetch(
        self,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow,
        commit: Commit | None = None,
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        return await self._with_any(
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
        return await self._with_any(
            prefix,
            lambda origin: origin.list_prefix(prefix, received, flat=flat),
        )

    async def list_page(self, wanted: PageRequest) -> ListedPage:
        """As `Origin.list_page`."""
        return await self._with_any(wanted.prefix, lambda origin: origin.list_page(wanted))

    async def part_span(self, obj: RemoteObject, number: int) -> tuple[int, int] | None:
        """As `Origin.part_span`."""
        return await self._with_any(obj.url, lambda origin: origin.part_span(obj, number))

    async def ask_tier(
        self,
        route: Route,
        obj: RemoteObject,
        parts: Parts,
        flow: Flow | None,
    ) -> Answer | None:
        """As `Origin.ask_tier`; with the credentials that are tried first."""
        async with self._first_origin(obj.url) as origin:
            return await origin.ask_tier(route, obj, parts, flow)

    async def permitted_lately(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.permitted_lately`; with the credentials that are tried first."""
        async with self._first_origin(url) as origin:
            return await origin.permitted_lately(route, url)

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`; of those that are tried first."""
        async with self._first_origin(url) as origin:
            return await origin.credentials(url)

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`; with the credentials that are tried first."""
        async with self._first_origin(url) as origin:
            await origin.prepare(url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`; with the own credentials alone."""
        async with self._own.use(url) as origin:
            return await origin.upload(path, url, replaced)

    async def close(self) -> None:
        """As `Origin.close`."""
        for candidate in (self._own, *self._others.values()):
            await candidate.close()

    async def _with_any(
        self,
        url: str,
        request: Callable[[CredentialedOrigin], Awaitable[_Result]],
    ) -> _Result:
        """Make a request with one set of credentials after another, until the store permits it.

        Raises the error that the credentials with access to the folder get; without any such, that
        of the first.
        """
        await self._update_candidates()
        if not self._others:  # in nearly all daemons; every part of a file passes here
            async with self._own.use(url) as origin:
                return await request(origin)
        refused: list[tuple[_Candidate, OriginError | ConfigError]] = []
        for candidate in self._in_order(url):
            try:
                async with candidate.use(url) as origin:
                    result = await request(origin)
            except NotFoundError as exn:
                if origin.not_found_is_final(url):
                    self._remember(candidate, refused, url)
                    raise
                refused.append((candidate, exn))
            except (AccessDeniedError, ConfigError) as exn:
                refused.append((candidate, exn))
            except OriginUnavailableError as exn:
                if not exn.has_expired:
                    raise
                refused.append((candidate, exn))
            else:
                self._remember(candidate, refused, url)
                return result
        self._successful.pop(self.store.bucket(url), None)
        _, first_error = refused[0]
        raise first_error

    async def _update_candidates(self) -> None:
        """Have a candidate for each of the credentials that are kept now, and for no others."""
        handed = self._setup.handed
        if not self._uses_handed or self._changes == handed.changes:
            return
        self._changes = handed.changes
        previous = self._others
        self._others = {}
        for credentials in handed.newest_first(self.store.handed):
            if credentials in previous:
                self._others[credentials] = previous.pop(credentials)
            else:
                self._others[credentials] = _Candidate(partial(self._open, credentials))

        dropped = list(previous.values())
        for bucket, candidate in list(self._successful.items()):
            if candidate in dropped:
                del self._successful[bucket]
        for candidate in dropped:
            await candidate.retire()

    def _in_order(self, url: str) -> Iterator[_Candidate]:
        """Yield all candidates in the order in which they are to be tried."""
        first = self._likeliest(url)
        yield first
        folder = _folder(url)
        others = [each for each in self._by_preference(url) if each is not first]
        without_duplicates = dict.fromkeys(others)
        yield from sorted(without_duplicates, key=lambda each: each.is_refused(folder))

    def _likeliest(self, url: str) -> _Candidate:
        """Return the candidate that is tried first: not one refused lately, if there is another."""
        folder = _folder(url)
        for candidate in self._by_preference(url):
            if not candidate.is_refused(folder):
                return candidate
        return next(self._by_preference(url))

    def _by_preference(self, url: str) -> Iterator[_Candidate]:
        """Yield all candidates, the best first, some of them twice.

        1. The candidate of the session that asks: it probably has the permission, and the store's
           log then names the right user.
        2. The last one that has read from the bucket.
        3. The others, from the newest credentials to the daemon's own.
        """
        handed = self._setup.handed
        asking = handed.of_this_task(self.store.handed)
        if asking is not None and asking == handed.own(self.store.handed):
            yield self._own
        elif asking is not None and asking in self._others:
            yield self._others[asking]
        last_successful = self._successful.get(self.store.bucket(url))
        if last_successful is not None:
            yield last_successful
        yield from self._others.values()
        yield self._own

    @asynccontextmanager
    async def _first_origin(self, url: str) -> AsyncIterator[CredentialedOrigin]:
        """Provide the origin that is tried first."""
        await self._update_candidates()
        async with self._likeliest(url).use(url) as origin:
            yield origin

    def _remember(
        self,
        permitted: _Candidate,
        refused: list[tuple[_Candidate, OriginError | ConfigError]],
        url: str,
    ) -> None:
        """Note which candidate may read an object, and which ones may not.

        Without one that may, refusals say nothing: S3 also refuses what is missing.
        """
        folder = _folder(url)
        permitted.permit(folder)
        for candidate, exn in refused:
            is_expired = isinstance(exn, OriginUnavailableError)
            candidate.refuse(_EVERYWHERE if is_expired else folder)
        if permitted.is_retired:
            return
        if len(self._successful) >= _MAX_BUCKETS:
            self._successful.clear()
        self._successful[self.store.bucket(url)] = permitted

    def _open(self, credentials: Credentials | None) -> _Opened:
        """Open the origin with credentials; None for the daemon's own. Blocks.

        Raises ImportError.
        """
        try:
            return self.store(replace(self._setup, credentials=credentials))
        except (AccessDeniedError, ConfigError) as exn:
            return exn


def _folder(url: str) -> str:
    """Return the part of a url that all objects of its folder share."""
    return url.rpartition("/")[0]
