"""Registry of origins, by url and `[[origin]]` table, and of the tiers in front of them.

The tier is nginx on each node of a cluster. A request to it is the request to the origin, signature
included, sent over a connection to this node's nginx. Nothing that it answers is trusted: the origin is requested where
the tier fails, and bytes that turn out damaged are fetched past its cache, which repairs it.
"""

import asyncio
import contextlib
import importlib
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardcache import errors, front
from shardcache.access import S3, AllowList, PlaceKind, checked, is_known, protocol_of, row_of
from shardcache.config import OriginTable, rule_of
from shardcache.logs import SharedLogger
from shardcache.origin.base import PRESIGNED_OPTIONS, Origin, RemoteObject, Route, Setup
from shardcache.origin.breaker import Breaker
from shardcache.transport.messages import Answer
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Commit, Flow, Received, Workers

# In addition to those for parts, so that requests for versions and listings never queue behind them.
_SPARE_CONNECTIONS = 8
# A preempted part keeps its connection while another one reads.
_CONNECTIONS_PER_SLOT = 2
_MAX_KNOWN = 10_000
_EXPECT_S = 30.0

log = SharedLogger()

QUESTION = 0.25
"""Share of the stall time-out after which a part's owner in the tier that sends nothing is asked whether it lives, and
has to answer."""

_WATCHED_S = 60.0
_STATUS_TIMEOUT_S = 5.0
_VERSION_LIMIT_S = 5.0
_MAX_SUSPECTS = 4096
_SLOW_S = 60.0
_BUSY = (429, 503)


def reason_to_bypass(table: OriginTable) -> str:
    """Return the reason that a table's urls bypass the tier; empty if they do not."""
    protocol = protocol_of(table.match) if table.match else S3.names[0]
    row = row_of(protocol)
    if row is S3:
        unsupported = sorted(set(table.storage_options) - PRESIGNED_OPTIONS)
        return f"storage_options has {', '.join(unsupported)}, which only the SDK supports" if unsupported else ""
    return "" if row.kind is PlaceKind.WEB else f"only S3 and web servers can have a tier, not {protocol}://"


class SlowOwners:
    """Owners that are left out for a minute, each because it was slower than the store twice within that time."""

    def __init__(self, pause_s: float = _SLOW_S) -> None:
        self._pause_s = pause_s
        self._seen_s: dict[str, float] = {}
        self._until_s: dict[str, float] = {}

    def add(self, owner: str, now_s: float) -> None:
        """Record that an owner was slower than the object store."""
        if now_s - self._seen_s.get(owner, -math.inf) < self._pause_s:
            self._until_s[owner] = now_s + self._pause_s
            log.info("a slow owner is left out of the tier", owner=owner, for_s=self._pause_s)
        self._seen_s[owner] = now_s

    def has(self, owner: str, now_s: float) -> bool:
        """Return whether an owner is left out."""
        return now_s < self._until_s.get(owner, -math.inf)

    def any(self, now_s: float) -> bool:
        """Return whether any owner is left out."""
        return self.left_out(now_s) > 0

    def left_out(self, now_s: float) -> int:
        """Return the number of owners that are left out."""
        return sum(now_s < until_s for until_s in self._until_s.values())


class TierState:
    """State of the tier at one socket."""

    def __init__(self, address: str) -> None:
        self.address = address  # path of the socket of this node's nginx
        self._breaker = Breaker()
        self._published: dict[str, Any] = {}
        self._suspects: dict[tuple[str, str, int], None] = {}  # parts whose cached bytes may be damaged, oldest first
        self.slow_owners = SlowOwners()

    def __repr__(self) -> str:
        return f"<TierState {self.address} {self._breaker}>"

    def to_json(self) -> dict[str, Any]:
        """Return the state for the status page."""
        expires_s = self._published.get("certificate_expires_s")
        owners_left_out = self.slow_owners.left_out(time.monotonic())
        return {
            "address": self.address,
            "failing": self._breaker.is_open,
            "stale": bool(self._published.get("stale")),
            "certificate_expires_s": expires_s if isinstance(expires_s, float) else None,
            "owners_left_out": owners_left_out,
            "store_bytes": self._count("from_store_bytes"),
            "cached_bytes": self._count("cached_bytes"),
        }

    def _count(self, name: str) -> int:
        """Return a number that this node's nginx publishes; 0 if it does not."""
        found = self._published.get(name)
        return found if isinstance(found, int) else 0

    async def watch(self) -> None:
        """Keep up with what `shardcache cluster run` publishes on this node; runs until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(_STATUS_TIMEOUT_S):
                    self._published = await self._status() or {}
            except (OSError, ValueError):
                self._published = {}
            await asyncio.sleep(_WATCHED_S)

    async def _status(self) -> dict[str, Any] | None:
        reader, writer = await asyncio.open_unix_connection(self.address)
        try:
            front.check_listener(writer.get_extra_info("socket"))
            writer.write(front.page_request(front.STATUS))
            return front.page_of(await reader.read())
        finally:
            writer.close()

    def route(self, obj: RemoteObject, start: int) -> Route | None:
        """Return the way to request the part at `start`; None while the breaker is open."""
        if not self._breaker.admits(time.monotonic()):
            return None
        return Route(self.address, refreshes=(obj.url, obj.version, start) in self._suspects)

    def version_route(self) -> Route | None:
        """Return the way to ask which version the store permitted lately; None while the breaker is open."""
        return Route(self.address, asks_version=True) if self._breaker.admits(time.monotonic()) else None

    def served(self, obj: RemoteObject, start: int) -> None:
        """Record that the tier answered a request as expected."""
        self._suspects.pop((obj.url, obj.version, start), None)
        if self._breaker.is_open:
            log.info("tier recovered", tier=self.address)
        self._breaker.succeeded()

    def failed(self, obj: RemoteObject, cause: str, *, stalled: bool = False) -> None:
        """Record that it did not; `stalled` if this node's nginx was silent: for a lost owner, it answers with 504."""
        was_open = self._breaker.is_open
        self._breaker.failed(time.monotonic(), stalled=stalled)
        if self._breaker.is_open and not was_open:
            log.warning("tier unavailable; fetching from the origin", tier=self.address, url=obj.url, cause=cause)

    def suspect(self, obj: RemoteObject, starts: Iterable[int]) -> None:
        """Request the parts that begin at `starts` past the tier's cache the next time: its bytes may be damaged."""
        for start in starts:
            self._suspects[obj.url, obj.version, start] = None
        while len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]


def sums_of(answer: Answer, obj: RemoteObject) -> list[PartSums]:
    """Return the checksums of the parts that the tier sent.

    Raises ShardChangedError for bytes that were not requested, OriginBusyError if the object store is throttling,
    OriginUnavailableError for any other answer without bytes.
    """
    if answer.sums is not None:
        return answer.sums
    if answer.status in _BUSY and "x-shardcache-tier" in answer.headers:
        raise errors.OriginBusyError(f"the object store answered the tier with status {answer.status}", url=obj.url)
    if answer.status < 300:
        raise errors.ShardChangedError("the tier sent bytes that were not requested", url=obj.url)
    raise errors.OriginUnavailableError(f"the tier answered with status {answer.status}", url=obj.url)


class Origins:
    """One origin per protocol and `[[origin]]` table in use; `redirect_guard` checks their redirects and links."""

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
        self._origins: dict[tuple[str, str], Deferred] = {}
        # By address, in front of them.
        self.tiers = {table.tier: TierState(table.tier) for table in tables if table.tier is not None}
        self._workers = Workers(silence_s=stall_timeout_s)

    def __repr__(self) -> str:
        return f"<Origins {sorted(self._origins)}>"

    def rule(self, url: str) -> OriginTable:
        """Return the table with the longest `match` that the url begins with; the defaults if none matches."""
        return rule_of(self._tables, url)

    def origin(self, url: str) -> "Deferred":
        """Return the origin of a url or prefix.

        Does not block: the packages it needs are imported on first use, in a thread. Raises ConfigError for a url that
        contains `..` or is a relative path.
        """
        protocol, table = protocol_of(checked(url)), self.rule(url)
        key = (protocol, table.match)
        if key not in self._origins:
            setup = Setup(protocol, table, self._connections, self._redirect_guard, self._workers)
            self._origins[key] = Deferred(setup, None if table.tier is None else self.tiers[table.tier])
        return self._origins[key]

    def suspect(self, obj: RemoteObject, part_bytes: int) -> None:
        """Make the tier, if there is one, fetch an object that arrived damaged again."""
        if (tier := self.origin(obj.url).tier) is not None:
            tier.suspect(obj, range(0, obj.size_bytes, part_bytes))

    @staticmethod
    async def check_protocols(urls: Iterable[str]) -> None:
        """Raise ConfigError if a url or prefix is of a protocol without a filesystem."""
        rare = [url for url in urls if "://" in url and not is_known(protocol_of(url))]
        if rare:
            await asyncio.to_thread(_check_protocols, rare)

    @staticmethod
    async def load() -> None:
        """Import what S3 needs before the first url comes: it takes a second, and most urls are S3's.

        Raises what an import raises. The request that needs the packages reports it.
        """
        await asyncio.to_thread(_load_s3)

    async def start_worker(self) -> None:
        """Start a transport worker before the first request needs it, and wait until it is up. Raises CacheError."""
        await self._workers.start_one()

    async def start_other_workers(self) -> None:
        """Start as many transport workers as a busy daemon has at least."""
        await self._workers.start_others()

    @property
    def s3_configured(self) -> list[str]:
        """One url for each configuration of S3, by a table or by the environment."""
        urls = {table.match for table in self._tables if table.match and row_of(protocol_of(table.match)) is S3}
        if any(name.startswith("AWS_") for name in os.environ):
            urls.add("s3://")
        return sorted(urls)

    async def prepare_credentials(self) -> None:
        """Obtain credentials for S3, if it is configured, before the first url comes.

        What fails is reported where it is needed. Unconfigured, the SDK would ask for an instance's credentials.
        """
        asking = (self.origin(url).credentials(url) for url in self.s3_configured)
        # Side by side, each with its own failure: a profile may even prompt for a code, where nobody is.
        await asyncio.gather(*asking, return_exceptions=True)

    async def close(self) -> None:
        """Close every connection."""
        while self._origins:
            _, origin = self._origins.popitem()
            await origin.close()
        await self._workers.close()


class Deferred(Origin):
    """An origin that is loaded in a thread on first use: importing an SDK takes a second."""

    def __init__(self, setup: Setup, tier: TierState | None) -> None:
        self.tier = tier  # in front of it, if any
        self._setup = setup
        self._loading = asyncio.Lock()
        self._origin: Origin | None = None
        self._known: dict[str, RemoteObject] = {}  # behind the tier, oldest first
        self._expecting: asyncio.Task[None] | None = None

    async def _loaded(self) -> Origin:
        async with self._loading:
            if self._origin is None:
                self._origin = await asyncio.to_thread(_load, self._setup)
        return self._origin

    def expect(self, url: str) -> None:
        """Load it, with its credentials and connections, before the first request, which will report what fails."""

        async def prepare() -> None:
            with contextlib.suppress(errors.ShardcacheError, TimeoutError):
                async with asyncio.timeout(_EXPECT_S):
                    await (await self._loaded()).prepare(url)

        self._expecting = self._expecting or asyncio.create_task(prepare())

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; any method may raise MissingPackageError or ConfigError as well."""
        origin = await self._loaded()
        if self.tier is None:
            return await origin.stat(url, first_bytes)
        try:
            obj = replace(await origin.stat(url), joinable=False)  # the tier caches single parts
        except errors.OriginUnavailableError:
            # The tier may have its parts; it asks whether this version may be read.
            lately = self._known.get(url) or await self._permitted_lately(origin, url, self.tier)
            if lately is None:
                raise
            return lately
        self._known.pop(url, None)
        self._known[url] = obj
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return obj

    @staticmethod
    async def _permitted_lately(origin: Origin, url: str, tier: TierState) -> RemoteObject | None:
        """Return the version that the tier knows while the store fails; None if it knows none, or fails, too."""
        route = tier.version_route()
        if route is None:
            return None
        try:
            async with asyncio.timeout(_VERSION_LIMIT_S):
                return await origin.permitted_lately(route, url)
        except (errors.OriginError, TimeoutError):
            return None

    async def fetch(
        self, obj: RemoteObject, parts: Parts, flow: Flow, commit: Commit | None = None
    ) -> list[PartSums] | None:
        """As `Origin.fetch`."""
        return await (await self._loaded()).fetch(obj, parts, flow, commit)

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """As `Origin.ask_tier`."""
        return await (await self._loaded()).ask_tier(route, obj, parts, flow)

    async def list_prefix(self, prefix: str, received: Received, *, flat: bool = False) -> list[RemoteObject]:
        """As `Origin.list_prefix`."""
        return await (await self._loaded()).list_prefix(prefix, received, flat=flat)

    async def credentials(self, url: str) -> str:
        """As `Origin.credentials`."""
        return await (await self._loaded()).credentials(url)

    async def upload(self, path: Path, url: str, replaced: str | None = None) -> RemoteObject:
        """As `Origin.upload`."""
        return await (await self._loaded()).upload(path, url, replaced)

    async def close(self) -> None:
        """Close the origin if it was loaded."""
        if self._expecting is not None:
            self._expecting.cancel()
        if self._origin is not None:
            await self._origin.close()


def _check_protocols(urls: Iterable[str]) -> None:
    from shardcache.origin.fsspec import check_protocol  # not earlier: its import takes long

    for url in urls:
        check_protocol(url)


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
        raise errors.MissingPackageError(
            f"{setup.protocol}:// urls need {what}, which is not installed",
            remedy=f"pip install {package}" if package else "install the package for the daemon",
        ) from exn
