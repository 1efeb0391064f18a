"""Registry of origins, by url and `[[origin]]` table."""

import asyncio
import importlib
import os
from collections.abc import Iterable, Sequence

from shardcache.access import PREPARED, AllowList, checked, is_known, protocol_of, row_of
from shardcache.config import OriginTable, rule_of
from shardcache.origin.base import Setup
from shardcache.origin.deferred_origin import DeferredOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.tier_state import TierState
from shardcache.origin.tiered_origin import TieredOrigin
from shardcache.transport.workers import Workers

# In addition to those for parts, so that requests for versions and listings never queue behind
# them.
_SPARE_CONNECTIONS = 8
# A preempted part keeps its connection while another one reads.
_CONNECTIONS_PER_SLOT = 2
# Of a table for all urls: most urls are S3's.
_USUAL_PROTOCOL = "s3"


def reason_to_bypass(table: OriginTable) -> str:
    """Return the reason that a table's urls bypass the tier; empty if they do not."""
    protocol = protocol_of(table.match) if table.match else _USUAL_PROTOCOL
    row = row_of(protocol)
    if not row.has_tier:
        return f"only S3 and web servers can have a tier, not {protocol}://"
    if row.signed_options is None:
        return ""
    unsupported = sorted(set(table.storage_options) - row.signed_options)
    if not unsupported:
        return ""
    return f"storage_options has {', '.join(unsupported)}, which only the SDK supports"


class Origins:
    """One origin per protocol and `[[origin]]` table in use.

    Args:
        max_connections: the most parts that are requested at the same time.
        redirect_guard: checks redirects and links; None for a process that reads with its own
            user's rights.

    Attributes:
        tiers: those in front of the origins, by address.
    """

    def __init__(
        self,
        tables: Sequence[OriginTable],
        *,
        max_connections: int,
        redirect_guard: AllowList | None = None,
        stall_timeout_s: float = 20.0,
    ) -> None:
        self._redirect_guard = redirect_guard
        self._tables = tables
        self._connections = _CONNECTIONS_PER_SLOT * max_connections + _SPARE_CONNECTIONS
        self._origins: dict[tuple[str, str], DeferredOrigin] = {}
        addresses = [table.tier for table in tables if table.tier is not None]
        self.tiers = {address: TierState(address) for address in addresses}
        self._workers = Workers(silence_s=stall_timeout_s)

    def __repr__(self) -> str:
        return f"<Origins {sorted(self._origins)}>"

    def rule(self, url: str) -> OriginTable:
        """Return the table with the longest `match` that the url begins with.

        The defaults if none matches.
        """
        return rule_of(self._tables, url)

    def origin(self, url: str) -> DeferredOrigin:
        """Return the origin of a url or prefix.

        Does not block: the packages it needs are imported on first use, in a thread. Raises
        ConfigError for a url that contains `..` or is a relative path.
        """
        protocol = protocol_of(checked(url))
        table = self.rule(url)
        key = (protocol, table.match)
        if key not in self._origins:
            self._origins[key] = self._new_origin(protocol, table)
        return self._origins[key]

    def _new_origin(self, protocol: str, table: OriginTable) -> DeferredOrigin:
        setup = Setup(protocol, table, self._connections, self._redirect_guard, self._workers)
        if table.tier is None:
            return DeferredOrigin(setup)
        return TieredOrigin(setup, self.tiers[table.tier])

    def suspect(self, obj: RemoteObject, part_bytes: int) -> None:
        """Make the tier, if there is one, fetch an object that arrived damaged again."""
        tier = self.origin(obj.url).tier
        if tier is not None:
            tier.suspect(obj, range(0, obj.size_bytes, part_bytes))

    @staticmethod
    async def check_protocols(urls: Iterable[str]) -> None:
        """Raise ConfigError if a url or prefix is of a protocol without a filesystem."""
        rare = [url for url in urls if "://" in url and not is_known(protocol_of(url))]
        if rare:
            await asyncio.to_thread(_check_protocols, rare)

    @property
    def prepared_urls(self) -> list[str]:
        """One url for each configuration of a store that is prepared before its first url comes.

        It is configured by a table or by the environment.
        """
        urls: set[str] = set()
        for table in self._tables:
            if table.match and row_of(protocol_of(table.match)) in PREPARED:
                urls.add(table.match)
        for row in PREPARED:
            if any(name.startswith(row.variables) for name in os.environ):
                urls.add(f"{row.names[0]}://")
        return sorted(urls)

    @staticmethod
    async def load() -> None:
        """Import what such a store needs before the first url comes: it takes a second.

        Raises what an import raises. The request that needs the packages reports it.
        """
        for row in PREPARED:
            await asyncio.to_thread(_call, row.load)

    async def prepare_credentials(self) -> None:
        """Obtain credentials for such stores, where they are configured.

        What fails is reported where it is needed. Unconfigured, an SDK would ask for an instance's
        credentials.
        """
        asking = [self.origin(url).credentials(url) for url in self.prepared_urls]
        # Side by side, each with its own failure: a profile may even prompt for a code, where
        # nobody is.
        await asyncio.gather(*asking, return_exceptions=True)

    async def start_worker(self) -> None:
        """Start a transport worker before the first request needs it, and wait until it is up.

        Raises CacheError.
        """
        await self._workers.start_one()

    async def start_other_workers(self) -> None:
        """Start as many transport workers as a busy daemon has at least."""
        await self._workers.start_others()

    async def close(self) -> None:
        """Close every connection."""
        while self._origins:
            _, origin = self._origins.popitem()
            await origin.close()
        await self._workers.close()


def _check_protocols(urls: Iterable[str]) -> None:
    # Not earlier: its import takes long.
    from shardcache.origin.filesystems.fsspec_origin import check_protocol

    for url in urls:
        check_protocol(url)


def _call(function: str) -> None:
    """Import and call a function that is named as `module:function`."""
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)()
