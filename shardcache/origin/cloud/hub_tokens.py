"""The Hugging Face Hub, read with any of a user's tokens."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from shardcache.errors import AccessDeniedError, NotFoundError
from shardcache.origin.base import Origin, Setup
from shardcache.origin.cloud.hub_origin import HubOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.shared.credentials.hub_token import HubToken
from shardcache.transport.between.flow import Commit, Flow, Received
from shardcache.transport.between.parts import Parts, PartSums

_Result = TypeVar("_Result")


class HubTokensOrigin(Origin):
    """The Hub, by the daemon's own token and by those that sessions have handed over.

    There is one origin per token, and a repository is read with the first that may read it. To a
    token without permission, the Hub answers that there is no such repository: this must not reach
    the job whose token has the permission. With a table's own token, or `anon`, there are no
    others.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        table = setup.table
        self._is_shared = not table.anon and "token" not in table.storage_options
        self._own = HubOrigin(setup)
        self._others: dict[HubToken, HubOrigin] = {}

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
        return await self._candidates(url)[0].credentials(url)

    async def prepare(self, url: str) -> None:
        """As `Origin.prepare`."""
        await self._candidates(url)[0].prepare(url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`; with the own token alone."""
        return await self._own.upload(path, url, replaced)

    async def close(self) -> None:
        """As `Origin.close`."""
        for origin in (self._own, *self._others.values()):
            await origin.close()

    async def _permitted(
        self,
        url: str,
        request: Callable[[HubOrigin], Awaitable[_Result]],
    ) -> _Result:
        """Return what a request returns with the first token that the Hub permits it to.

        Raises the error of the token that may read the repository; if none may, of the newest.
        """
        refusals: list[AccessDeniedError | NotFoundError] = []
        for origin in self._candidates(url):
            try:
                return await request(origin)
            except NotFoundError as exn:
                if origin.may_read(url):  # another token would find no more
                    raise
                refusals.append(exn)
            except AccessDeniedError as exn:
                refusals.append(exn)
        raise refusals[0]

    def _candidates(self, url: str) -> list[HubOrigin]:
        """Return the origins of all tokens, those first that have read from the repository."""
        tokens = self._setup.handed.tokens.newest_first if self._is_shared else []
        if not tokens:  # of nearly all daemons; every part of a file passes here
            return [self._own]
        # The origins of tokens that are no longer kept end with their last requests.
        self._others = {token: self._others.get(token) or self._new(token) for token in tokens}
        origins = [*self._others.values(), self._own]
        return sorted(origins, key=lambda origin: not origin.may_read(url))

    def _new(self, token: HubToken) -> HubOrigin:
        table = self._setup.table
        options = {**table.storage_options, "token": token.value}
        table_of_token = table.model_copy(update={"storage_options": options})
        return HubOrigin(replace(self._setup, table=table_of_token))
