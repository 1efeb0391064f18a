"""An object store, read with any of a user's credentials."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

from shardcache.errors import AccessDeniedError, ConfigError, NotFoundError
from shardcache.origin.base import Origin, Setup
from shardcache.origin.cloud.azure_origin import AzureOrigin
from shardcache.origin.cloud.gcs_origin import GcsOrigin
from shardcache.origin.cloud.hub_origin import HubOrigin
from shardcache.origin.cloud.store_origin import StoreOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.shared.credentials.handed_credentials import Credentials
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.parts import Parts, PartSums

_Result = TypeVar("_Result")
_Opened = StoreOrigin | ConfigError | AccessDeniedError
"""An origin, or the error for credentials with which it cannot be opened."""


class PermittedOrigin(Origin):
    """A store, by the daemon's own credentials and by those that sessions have handed over.

    There is one origin for each of them, and a bucket is read with the first that may read it:
    those go first that have read from it. A refusal must not reach the job whose credentials have
    the permission, so it is raised after all have been refused. With a table's own credentials, or
    `anon`, there are no others.

    Attributes:
        store: class of the origins.
    """

    store: ClassVar[type[StoreOrigin]]

    def __init__(self, setup: Setup) -> None:
        """Open the origin with the daemon's own credentials. Raises ImportError."""
        self._setup = setup
        table = setup.table
        has_own = not self.store.secrets.isdisjoint(table.storage_options)
        self._is_shared = not table.anon and not has_own
        self._own = self._open(None)
        self._others: dict[Credentials, _Opened] = {}
        self._opening = asyncio.Lock()

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

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`."""
        return await self._permitted(url, lambda origin: origin.credentials(url))

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`."""
        await self._permitted(url, lambda origin: origin.prepare(url))

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`; with the own credentials alone."""
        if not isinstance(self._own, StoreOrigin):
            raise self._own
        return await self._own.upload(path, url, replaced)

    async def close(self) -> None:
        """As `Origin.close`."""
        for opened in (self._own, *self._others.values()):
            if isinstance(opened, StoreOrigin):
                await opened.close()

    async def _permitted(
        self,
        url: str,
        request: Callable[[StoreOrigin], Awaitable[_Result]],
    ) -> _Result:
        """Return what a request returns with the first credentials that the store permits it to.

        Raises the error of those that may read the bucket; if none may, of the newest.
        """
        refusals: list[AccessDeniedError | ConfigError | NotFoundError] = []
        for origin in await self._candidates(url):
            if not isinstance(origin, StoreOrigin):
                refusals.append(type(origin)(origin.message, url=url, remedy=origin.remedy))
                continue
            try:
                return await request(origin)
            except NotFoundError as exn:
                if origin.may_read(url):  # others would find no more
                    raise
                refusals.append(exn)
            except AccessDeniedError as exn:
                refusals.append(exn)
        raise refusals[0]

    async def _candidates(self, url: str) -> list[_Opened]:
        """Return the origins of all credentials, those first that have read from the bucket."""
        wanted = self._setup.handed.newest_first(self.store.handed) if self._is_shared else []
        if not wanted:  # of nearly all daemons; every part of a file passes here
            return [self._own]
        if any(each not in self._others for each in wanted):
            await self._open_all()
        others = [self._others[each] for each in wanted if each in self._others]
        return sorted([*others, self._own], key=lambda opened: not _may_read(opened, url))

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
        setup = self._setup
        try:
            if credentials is not None:
                options = self.store.options_of(credentials)
                table = setup.table
                options = {**table.storage_options, **options}
                own_table = table.model_copy(update={"storage_options": options})
                setup = replace(setup, table=own_table)
            return self.store(setup)
        except (AccessDeniedError, ConfigError) as exn:
            return exn


def _may_read(opened: _Opened, url: str) -> bool:
    return isinstance(opened, StoreOrigin) and opened.may_read(url)


class PermittedAzure(PermittedOrigin):
    """Azure Blob Storage, read with any of a user's secrets."""

    store = AzureOrigin


class PermittedGcs(PermittedOrigin):
    """Google Cloud Storage, read with any of a user's keys."""

    store = GcsOrigin


class PermittedHub(PermittedOrigin):
    """The Hugging Face Hub, read with any of a user's tokens.

    To a token without permission, it answers that there is no such repository.
    """

    store = HubOrigin
