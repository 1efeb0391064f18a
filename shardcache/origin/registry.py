"""Registry of origins, by url and `[[origin]]` table.

An `[[origin]]` table of the config has options for the urls that begin with its `match`. All code
of the daemon that reads from a url gets the url's origin from `Origins`. A protocol's row, in
`access.protocols`, says what the protocol supports. The tier is an optional cache that the nodes of
a cluster share. A transport worker is a process that sends requests and writes bodies.
"""

import asyncio
import importlib
import os
from collections.abc import Iterable, Sequence

from shardcache.access.deceptive import checked
from shardcache.access.protocols import COMMON, PREPARED, is_known, row_of
from shardcache.access.rules import AllowList
from shardcache.access.urls import protocol_of
from shardcache.config.origin_table import OriginTable, table_of
from shardcache.origin.accepted_signatures import Signatures
from shardcache.origin.base import Setup
from shardcache.origin.deferred_origin import DeferredOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.session_credentials import SessionCredentials
from shardcache.origin.tier.tier_state import TierState
from shardcache.origin.tiered_origin import TieredOrigin
from shardcache.transport.worker_pool import Workers

# A part that was preempted keeps its connection while a more urgent part reads. So there may be
# twice as many connections as parts that are read at the same time.
_CONNECTIONS_PER_PART = 2
# Number of additional connections, so that requests for versions and listings never queue behind
# parts.
_SPARE_CONNECTIONS = 8


def reason_to_bypass(table: OriginTable) -> str:
    """Return why a table's urls bypass the tier that the table names; empty if they do not."""
    if table.match:
        protocol = protocol_of(table.match)
    else:
        protocol = COMMON[0]  # the table is for all urls: check the most common protocol
    row = row_of(protocol)
    if not row.has_tier:
        return f"only S3 and web servers can have a tier, not {protocol}://"

    if row.presigned_options is None:  # a tier can be used with any option
        return ""
    # S3's requests to a tier go to presigned urls, which support only some options.
    unsupported = sorted(set(table.storage_options) - row.presigned_options)
    if unsupported:
        return f"storage_options has {', '.join(unsupported)}, which only the SDK supports"
    return ""


class Origins:
    """One origin per protocol and `[[origin]]` table in use.

    Args:
        tables: the `[[origin]]` tables of the config.
        max_connections: maximum number of parts that are requested at the same time, from all
            origins together. Each origin may open more connections than that.
        redirect_guard: rules that the targets of redirects and links must satisfy; None for a
            process that reads with its own user's rights.
        stall_timeout_s: time without any message after which a transport worker that has requests
            is replaced.
        is_private: True for a private daemon, to which sessions may hand over credentials.

    Attributes:
        tiers: states of the cluster's shared caches in front of the origins, by address.
        session_credentials: credentials that sessions have handed over to a private daemon.
        signatures: signed urls that were accepted lately.
    """

    def __init__(
        self,
        tables: Sequence[OriginTable],
        *,
        max_connections: int,
        redirect_guard: AllowList | None = None,
        stall_timeout_s: float = 20.0,
        is_private: bool = False,
    ) -> None:
        self._redirect_guard = redirect_guard
        self._tables = tables
        self._connections_per_origin = _CONNECTIONS_PER_PART * max_connections + _SPARE_CONNECTIONS
        self._origins: dict[tuple[str, str], DeferredOrigin] = {}  # by protocol and table's match
        addresses = [table.tier for table in tables if table.tier is not None]
        self.tiers = {address: TierState(address) for address in addresses}
        self.session_credentials = SessionCredentials(os.environ, is_private=is_private)
        self.signatures = Signatures()
        self._workers = Workers(silence_s=stall_timeout_s)

    def __repr__(self) -> str:
        return f"<Origins {sorted(self._origins)}>"

    def table(self, url: str) -> OriginTable:
        """Return the table with the longest `match` that the url begins with.

        Returns a table of defaults if no table matches.
        """
        return table_of(self._tables, url)

    def origin(self, url: str) -> DeferredOrigin:
        """Return the origin of a url or prefix.

        This does not block: the packages that the origin needs are imported on its first use, in a
        thread. Raises ConfigError for a url that contains `..` or is a relative path.
        """
        protocol = protocol_of(checked(url))
        table = self.table(url)
        key = (protocol, table.match)
        if key not in self._origins:
            self._origins[key] = self._new_origin(protocol, table)
        return self._origins[key]

    def suspect(self, obj: RemoteObject, part_bytes: int) -> None:
        """Report that an object arrived damaged.

        If the object's origin has a tier, the next requests for its parts go past the tier's cache.

        Args:
            part_bytes: size of the parts in which the object was requested.
        """
        tier = self.origin(obj.url).tier
        if tier is not None:
            tier.suspect(obj, range(0, obj.size_bytes, part_bytes))

    @staticmethod
    async def check_protocols(urls: Iterable[str]) -> None:
        """Raise ConfigError for a url or prefix whose protocol nothing here can read."""
        rare = [url for url in urls if "://" in url and not is_known(protocol_of(url))]
        if rare:
            await asyncio.to_thread(_check_rare_protocols, rare)

    @property
    def urls_to_prepare(self) -> list[str]:
        """Urls or prefixes for which the daemon prepares before a reader requests any url.

        There is one for each table with a `match` whose protocol is in `PREPARED`, and one for each
        protocol in `PREPARED` that the environment configures.
        """
        urls: set[str] = set()
        for table in self._tables:
            if table.match and row_of(protocol_of(table.match)) in PREPARED:
                urls.add(table.match)
        for row in PREPARED:
            if any(name.startswith(row.variable_prefix) for name in os.environ):
                urls.add(f"{row.names[0]}://")
        return sorted(urls)

    @staticmethod
    async def load_sdks() -> None:
        """Load the SDKs of the protocols in `PREPARED`, which takes about a second.

        SDKs are loaded even if nothing configures their protocols. Raises the errors of imports.
        The caller need not report them: a later request that needs the SDK fails with the same
        error.
        """
        for row in PREPARED:
            await asyncio.to_thread(_import_and_call, row.load)

    async def prepare_credentials(self) -> None:
        """Obtain the credentials for `urls_to_prepare`, and for no other store.

        For a store that is not configured, the SDK would ask the cloud instance's metadata service.
        Errors are ignored: the request that needs the credentials reports them.
        """
        # All are obtained concurrently, so that no other url waits for a profile that prompts the
        # user for a code.
        obtaining = [self.origin(url).obtain_credentials(url) for url in self.urls_to_prepare]
        await asyncio.gather(*obtaining, return_exceptions=True)

    async def start_worker(self) -> None:
        """Start a transport worker before the first request needs it, and wait until it is up.

        Raises CacheError.
        """
        await self._workers.start_one()

    async def start_other_workers(self) -> None:
        """Start the other transport workers that a busy daemon always has."""
        await self._workers.start_others()

    async def close(self) -> None:
        """Close every connection, and end the transport workers."""
        while self._origins:  # not a `for` loop: an origin may be added while another closes
            _, origin = self._origins.popitem()
            await origin.close()
        await self._workers.close()

    def _new_origin(self, protocol: str, table: OriginTable) -> DeferredOrigin:
        """Return an origin for a protocol's urls that a table matches; it is not loaded yet."""
        setup = Setup(
            protocol,
            table,
            max_connections=self._connections_per_origin,
            redirect_guard=self._redirect_guard,
            workers=self._workers,
            session_credentials=self.session_credentials,
            signatures=self.signatures,
        )
        if table.tier is None:
            return DeferredOrigin(setup)
        return TieredOrigin(setup, self.tiers[table.tier])


def _check_rare_protocols(urls: Iterable[str]) -> None:
    """Raise ConfigError if fsspec has no filesystem for a url. Blocks."""
    # The import is here because fsspec takes long to load, and these protocols are rare.
    from shardcache.origin.filesystems.fsspec_origin import check_protocol

    for url in urls:
        check_protocol(url)


def _import_and_call(function: str) -> None:
    """Import and call a function that is given as `module:function`."""
    module_name, _, name = function.partition(":")
    module = importlib.import_module(module_name)
    getattr(module, name)()
