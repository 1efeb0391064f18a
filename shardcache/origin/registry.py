"""Registry of origins, by url and `[[origin]]` table."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardcache.access.urls import checked, protocol_of, row_of
from shardcache.config import OriginTable
from shardcache.errors import CacheError, ConfigError, MissingPackageError, OriginUnavailableError
from shardcache.origin.base import WRITABLE, Origin, RedirectGuard, RemoteObject, Setup, Unrestricted, Uploads
from shardcache.origin.tier_client import Route, Tiered, TierState
from shardcache.transport.messages import Answer
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow, Received, Workers

# In addition to those for parts, so that requests for versions and listings never queue behind them.
_SPARE_CONNECTIONS = 8
# A preempted part keeps its connection while another one reads.
_CONNECTIONS_PER_SLOT = 2
_MAX_KNOWN = 10_000
_DEFAULT = OriginTable.model_validate({"match": ""})


class Origins:
    """One origin per protocol and `[[origin]]` table in use; `redirect_guard` checks their redirects and links.

    Attributes:
        tiers: the tiers in front of them, by address.
    """

    def __init__(
        self,
        tables: Sequence[OriginTable],
        *,
        max_connections: int,
        redirect_guard: RedirectGuard | None = None,
        stall_timeout_s: float = 20.0,
    ) -> None:
        self._redirect_guard = redirect_guard or Unrestricted()
        self._tables = sorted(tables, key=lambda table: len(table.match), reverse=True)
        self._connections = _CONNECTIONS_PER_SLOT * max_connections + _SPARE_CONNECTIONS
        self._origins: dict[tuple[str, str], Deferred] = {}
        self.tiers = {table.tier: TierState(table.tier) for table in tables if table.tier is not None}
        self._workers = Workers(silence_s=stall_timeout_s)

    def __repr__(self) -> str:
        return f"<Origins {sorted(self._origins)}>"

    def rule(self, url: str) -> OriginTable:
        """Return the table with the longest `match` that the url begins with; the defaults if none matches."""
        return next((table for table in self._tables if url.startswith(table.match)), _DEFAULT)

    def origin(self, url: str) -> Origin:
        """Return the origin of a url or prefix.

        Does not block: the packages it needs are imported on first use, in a thread. Raises ConfigError for a url that
        contains `..` or is a relative path.
        """
        return self._deferred(url)

    def uploads(self, url: str) -> Uploads:
        """Return the origin of a url or prefix to be written to. Raises as `origin`; so does writing, if it cannot."""
        return self._deferred(url)

    def _deferred(self, url: str) -> Deferred:
        protocol, table = protocol_of(checked(url)), self.rule(url)
        key = (protocol, table.match)
        if key not in self._origins:
            setup = Setup(protocol, table, self._connections, self._redirect_guard, self._workers)
            self._origins[key] = Deferred(setup, None if table.tier is None else self.tiers[table.tier])
        return self._origins[key]

    def suspect(self, obj: RemoteObject, part_bytes: int) -> None:
        """Make the tier, if there is one, fetch an object that arrived damaged again."""
        if (tier := self._deferred(obj.url).tier) is not None:
            tier.suspect(obj, range(0, obj.size_bytes, part_bytes))

    @staticmethod
    async def load() -> None:
        """Import what S3 needs before the first url comes: it takes a second, and most urls are S3's."""
        with contextlib.suppress(ImportError):
            await asyncio.to_thread(_load_s3)

    async def prepare(self) -> None:
        """Start a transport worker before the first url comes."""
        with contextlib.suppress(CacheError):  # raised again when a worker is needed
            await self._workers.prepare()

    async def close(self) -> None:
        """Close every connection."""
        while self._origins:
            _, origin = self._origins.popitem()
            await origin.close()
        await self._workers.close()


class Deferred:
    """An origin that is loaded in a thread on first use: importing an SDK takes a second.

    Attributes:
        tier: the tier in front of it, if any.
    """

    def __init__(self, setup: Setup, tier: TierState | None = None) -> None:
        self.tier = tier
        self._setup = setup
        self._loading = asyncio.Lock()
        self._origin: Origin | None = None
        self._known: dict[str, RemoteObject] = {}  # behind the tier, oldest first

    async def _loaded(self) -> Origin:
        async with self._loading:
            if self._origin is None:
                self._origin = await asyncio.to_thread(_load, self._setup)
        return self._origin

    async def stat(self, url: str) -> RemoteObject:
        """As `Origin.stat`; any method may raise MissingPackageError or ConfigError as well."""
        origin = await self._loaded()
        if self.tier is None:
            return await origin.stat(url)
        try:
            obj = replace(await origin.stat(url), joinable=False)  # the tier caches single parts
        except OriginUnavailableError:
            if url not in self._known:
                raise
            return self._known[url]  # the tier may have its parts; it asks whether this version may be read
        self._known.pop(url, None)
        self._known[url] = obj
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return obj

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        return await (await self._loaded()).fetch(obj, parts, flow, commit)

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """As `Tiered.ask_tier`; None for an origin that cannot have a tier."""
        origin = await self._loaded()
        return await origin.ask_tier(route, obj, parts, flow) if isinstance(origin, Tiered) else None

    async def list_prefix(self, prefix: str, received: Received) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        return await (await self._loaded()).list_prefix(prefix, received)

    async def upload(self, path: Path, url: str) -> RemoteObject:
        """As `Uploads.upload`. Raises ConfigError for an origin that is only read."""
        origin = await self._loaded()
        if not isinstance(origin, Uploads):
            raise ConfigError("this kind of url can only be read", url=url, remedy=WRITABLE)
        return await origin.upload(path, url)

    async def close(self) -> None:
        """Close the origin if it was loaded."""
        if self._origin is not None:
            await self._origin.close()


def _load_s3() -> None:
    from shardcache.origin import s3, s3_sdk

    assert s3
    s3_sdk.descriptions()


def _load(setup: Setup) -> Origin:
    row = row_of(setup.protocol)
    module, _, name = row.origin.partition(":")
    try:
        origin: Origin = getattr(importlib.import_module(module), name)(setup)
        return origin
    except ImportError as exn:
        package = row.package or (exn.name or "").partition(".")[0]
        what = f"the Python package {package}" if package else f"a Python package ({exn})"
        raise MissingPackageError(
            f"{setup.protocol}:// urls need {what}, which is not installed",
            remedy=f"pip install {package}" if package else "install the package for the daemon",
        ) from exn
