"""Object stores that are read with whichever of a user's credentials has the permission.

A private daemon serves the readers of one user. Each reader's session, that is, its connection to
the daemon, may hand over other credentials. `PermittedOrigin` tries one set after another until the
store permits a request. A candidate is the store as opened with one set of credentials. A folder is
a url up to its last slash; credentials that are refused one object are likely to be refused all of
its folder. The table is the `[[origin]]` table for the store in the daemon's config.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from shardcache.origin.base import Origin, Setup
from shardcache.origin.objects import ListedPage, PageRequest, RemoteObject
from shardcache.origin.tier.tier_state import Route
from shardcache.shared.credentials.handed_credentials import Credentials
from shardcache.shared.exceptions import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OriginError,
    OriginUnavailableError,
)
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import Parts, PartSums

_MAX_BUCKETS = 10_000  # number of buckets whose last successful candidate is remembered
_MAX_FOLDERS = 1_000  # number of folders in which a candidate's refusals are remembered
# Credentials that were refused in a folder are tried last there for this time, because a refused
# `stat` costs three requests to S3.
_REFUSED_S = 300.0
_EVERYWHERE = ""  # the folder that stands for all folders
_Result = TypeVar("_Result")


class CredentialedOrigin(Origin):
    """An object store that is read with one set of credentials.

    The credentials come from the first of these that has any: its `Setup`, the table, and the
    places in which the store's package looks.

    Attributes:
        credentials_kind: kind of the credentials that sessions hand over for this store.
        secrets: names of the `storage_options` of a table that are credentials. If a table has one
            of these options, the credentials of sessions are not used.
    """

    credentials_kind: ClassVar[type[Credentials]]
    secrets: ClassVar[frozenset[str]] = frozenset({"token"})

    def __init__(self, setup: Setup) -> None:
        """Open the store. Blocks.

        Raises ImportError; AccessDeniedError or ConfigError for unusable credentials.
        """

    @staticmethod
    def bucket(url: str) -> str:
        """Return the part of a url that one permission usually covers."""
        return url.partition("://")[2].partition("/")[0]

    def not_found_is_final(self, url: str) -> bool:
        """Return whether no other credentials could find an object that these do not find."""
        return True


_Opened = CredentialedOrigin | AccessDeniedError | ConfigError
"""An opened origin, or the error for credentials with which it cannot be opened."""


class _Candidate:
    """A store with one set of credentials. It is opened when it is first used.

    Args:
        open_: opens the store. It blocks, so it is called in a thread.

    Attributes:
        is_retired: True once the daemon no longer keeps these credentials.
    """

    def __init__(self, open_: Callable[[], _Opened]) -> None:
        self._open = open_
        self._opened: _Opened | None = None
        self._opening = asyncio.Lock()
        self._users = 0  # number of requests that use the origin at present
        self.is_retired = False
        # By folder: the time by the monotonic clock at which the store refused a request there.
        self._refused: dict[str, float] = {}

    @asynccontextmanager
    async def use(self, url: str) -> AsyncIterator[CredentialedOrigin]:
        """Provide the origin for a request to a url.

        Raises AccessDeniedError or ConfigError if the origin could not be opened.
        """
        self._users += 1
        try:
            yield await self._origin_for(url)
        finally:
            self._users -= 1
            if self.is_retired and not self._users:
                await self.close()

    async def retire(self) -> None:
        """Close the origin, after the last of the requests that use it."""
        self.is_retired = True
        if not self._users:
            await self.close()

    async def close(self) -> None:
        """Close the origin if it was opened."""
        if isinstance(self._opened, CredentialedOrigin):
            await self._opened.close()

    def was_refused_lately(self, folder: str) -> bool:
        """Return whether the store refused a request in a folder, or everywhere, lately."""
        refused_in_folder_s = self._refused.get(folder, -math.inf)
        refused_everywhere_s = self._refused.get(_EVERYWHERE, -math.inf)
        last_refused_s = max(refused_in_folder_s, refused_everywhere_s)
        return time.monotonic() - last_refused_s < _REFUSED_S

    def record_refusal(self, folder: str) -> None:
        """Record that the store refused a request in a folder, or `_EVERYWHERE`."""
        if len(self._refused) >= _MAX_FOLDERS:
            self._refused.clear()
        self._refused[folder] = time.monotonic()

    def record_permission(self, folder: str) -> None:
        """Record that the store permitted a request in a folder."""
        self._refused.pop(folder, None)
        self._refused.pop(_EVERYWHERE, None)

    async def _origin_for(self, url: str) -> CredentialedOrigin:
        """Return the origin, opened if necessary; raise the errors of `use`."""
        if self._opened is None:
            async with self._opening:
                # Another request may have opened the origin while this one waited.
                if self._opened is None:
                    self._opened = await asyncio.to_thread(self._open)
        opened = self._opened
        if isinstance(opened, CredentialedOrigin):
            return opened
        # The error is kept for all requests, so each raises a copy with its own url.
        raise type(opened)(opened.message, url=url, remedy=opened.remedy)


class _Refusal(NamedTuple):
    """A candidate that the store refused, and the error."""

    candidate: _Candidate
    error: OriginError | ConfigError


class PermittedOrigin(Origin):
    """A store that is read with the daemon's own credentials and with those of sessions.

    There is one origin for each set of credentials. No job may be refused what another job's
    credentials permit, so an error is raised only after all sets have been refused. If the table
    names credentials, or sets `anon`, the sessions' credentials are not used.

    Attributes:
        store_class: class of the origins.
    """

    store_class: ClassVar[type[CredentialedOrigin]]

    def __init__(self, setup: Setup) -> None:
        """Open the origin with the daemon's own credentials. Raises ImportError."""
        self._setup = setup
        table = setup.table
        has_secrets = not self.store_class.secrets.isdisjoint(table.storage_options)
        self._uses_session_credentials = not (table.anon or table.profile or has_secrets)
        # The store is opened now rather than on first use, so that a missing package is reported.
        opened = self._open(None)
        self._own = _Candidate(lambda: opened)
        # Candidates for the sessions' credentials, the newest credentials first.
        self._others: dict[Credentials, _Candidate] = {}
        # By bucket: the candidate that has last read from the bucket.
        self._successful: dict[str, _Candidate] = {}
        self._seen_changes = 0  # value of `SessionCredentials.changes` when `_others` was updated

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
        """As `Origin.ask_tier`, but only with the credentials that are tried first."""
        async with self._first_origin(obj.url) as origin:
            return await origin.ask_tier(route, obj, parts, flow)

    async def ask_tier_for_version(self, route: Route, url: str) -> RemoteObject | None:
        """As `Origin.ask_tier_for_version`, but only with the credentials that are tried first."""
        async with self._first_origin(url) as origin:
            return await origin.ask_tier_for_version(route, url)

    async def obtain_credentials(self, url: str) -> str:
        """As `Origin.obtain_credentials`, for the credentials that are tried first."""
        async with self._first_origin(url) as origin:
            return await origin.obtain_credentials(url)

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`, but only with the credentials that are tried first."""
        async with self._first_origin(url) as origin:
            await origin.prepare(url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`, but only with the daemon's own credentials."""
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

        A NotFoundError is raised if it `not_found_is_final`, that is, if the object does not exist.
        If every set of credentials was refused, the first error is raised.
        """
        await self._update_candidates()
        # A shortcut for speed, because each request for parts of a file goes through this method:
        # nearly all daemons have only their own credentials.
        if not self._others:
            async with self._own.use(url) as origin:
                return await request(origin)
        refusals: list[_Refusal] = []
        for candidate in self._in_order(url):
            try:
                async with candidate.use(url) as origin:
                    result = await request(origin)
            except NotFoundError as exn:
                if origin.not_found_is_final(url):
                    self._remember(candidate, refusals, url)
                    raise
                refusals.append(_Refusal(candidate, exn))
            except (AccessDeniedError, ConfigError) as exn:
                refusals.append(_Refusal(candidate, exn))
            except OriginUnavailableError as exn:
                have_credentials_expired = exn.has_expired
                if not have_credentials_expired:
                    raise
                refusals.append(_Refusal(candidate, exn))
            else:
                self._remember(candidate, refusals, url)
                return result
        self._successful.pop(self.store_class.bucket(url), None)
        raise refusals[0].error

    async def _update_candidates(self) -> None:
        """Create and retire candidates, so that each set of the sessions' credentials has one."""
        session_credentials = self._setup.session_credentials
        has_changed = session_credentials.changes != self._seen_changes
        if not self._uses_session_credentials or not has_changed:
            return
        self._seen_changes = session_credentials.changes
        previous = self._others
        self._others = {}
        for credentials in session_credentials.newest_first(self.store_class.credentials_kind):
            if credentials in previous:
                self._others[credentials] = previous.pop(credentials)
            else:
                self._others[credentials] = _Candidate(partial(self._open, credentials))

        dropped = list(previous.values())  # those that were not moved to `_others`
        for bucket, candidate in list(self._successful.items()):
            if candidate in dropped:
                del self._successful[bucket]
        for candidate in dropped:
            await candidate.retire()

    def _in_order(self, url: str) -> Iterator[_Candidate]:
        """Yield all candidates in the order in which they are to be tried."""
        first = self._first_candidate(url)
        yield first
        # The order is computed after the first one was tried, which is usually the only one.
        folder = _folder(url)
        others = [each for each in self._by_preference(url) if each is not first]
        without_duplicates = dict.fromkeys(others)
        # The sort is stable: those refused lately come last, otherwise in the order of preference.
        yield from sorted(without_duplicates, key=lambda each: each.was_refused_lately(folder))

    def _first_candidate(self, url: str) -> _Candidate:
        """Return the candidate that is tried first.

        It is the most preferred one that was not refused in the folder lately; if all were, it is
        the most preferred one.
        """
        folder = _folder(url)
        for candidate in self._by_preference(url):
            if not candidate.was_refused_lately(folder):
                return candidate
        return next(self._by_preference(url))

    def _by_preference(self, url: str) -> Iterator[_Candidate]:
        """Yield all candidates, the most preferred first. Some candidates are yielded twice.

        1. The candidate of the session that asks: it probably has the permission, and the store's
           log then names the right user. The session may have the daemon's own credentials.
        2. The candidate that has last read from the bucket.
        3. All candidates, from the newest credentials to the daemon's own.
        """
        session_credentials = self._setup.session_credentials
        asking = session_credentials.of_this_task(self.store_class.credentials_kind)
        own = session_credentials.own(self.store_class.credentials_kind)
        if asking is not None and asking == own:
            yield self._own
        elif asking is not None and asking in self._others:
            yield self._others[asking]
        last_successful = self._successful.get(self.store_class.bucket(url))
        if last_successful is not None:
            yield last_successful
        yield from self._others.values()
        yield self._own

    @asynccontextmanager
    async def _first_origin(self, url: str) -> AsyncIterator[CredentialedOrigin]:
        """Provide the origin that is tried first."""
        await self._update_candidates()
        candidate = self._first_candidate(url)
        async with candidate.use(url) as origin:
            yield origin

    def _remember(
        self,
        permitted: _Candidate,
        refusals: list[_Refusal],
        url: str,
    ) -> None:
        """Record which candidate may read an object, and which ones may not.

        This is called only if one candidate may. If all are refused, nothing is recorded, because
        S3 may answer a request for a missing object as it does without permission.

        Args:
            permitted: the candidate whose request the store permitted.
            refusals: those of the candidates that were tried before.
        """
        folder = _folder(url)
        permitted.record_permission(folder)
        for candidate, error in refusals:
            # Expired credentials are the only OriginUnavailableError here: they fail in any folder.
            has_expired = isinstance(error, OriginUnavailableError)
            candidate.record_refusal(_EVERYWHERE if has_expired else folder)
        if permitted.is_retired:  # during this request
            return
        if len(self._successful) >= _MAX_BUCKETS:
            self._successful.clear()
        self._successful[self.store_class.bucket(url)] = permitted

    def _open(self, credentials: Credentials | None) -> _Opened:
        """Open the origin with credentials, or return the error for unusable ones. Blocks.

        Args:
            credentials: one session's credentials; None for the daemon's own.

        Raises ImportError.
        """
        try:
            return self.store_class(replace(self._setup, credentials=credentials))
        except (AccessDeniedError, ConfigError) as exn:
            return exn


def _folder(url: str) -> str:
    """Return the part of a url before its last slash, which all objects of its folder share."""
    return url.rpartition("/")[0]
