"""Checks of the object stores by this process, and of the cluster's tier in front of them.

Where the caller may read the environment of the running daemon, its variables of stores and
credentials are used in place of the caller's own.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice

from shardcache.access.protocols import STORES, WEB
from shardcache.access.rules import AllowList, Peer
from shardcache.access.urls import protocol_of, store_of
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.doctor.causes import failure
from shardcache.cli.doctor.context import Context, Finding, failed, me, ok, skipped, warning
from shardcache.cluster.tier_config import expiry_warning
from shardcache.config.settings import Settings
from shardcache.errors import OriginUnavailableError, ShardcacheError
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns.expansion import expand
from shardcache.origin.registry import Origins, reason_to_bypass
from shardcache.redact import HIDDEN
from shardcache.shared.front import PEERS, STATUS, page
from shardcache.shared.units import duration, size, user_name
from shardcache.shared.urls.url_names import is_index, is_shard
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.parts import Parts

_LIMIT_S = 20.0  # for a listing and the version of one object
_MAX_CACHED = 10_000  # cached shards whose stores are probed

# Time to the first byte.
_FIRST_BYTES = 64 * 1024
_SLOW_FIRST_BYTE_S = 1.0

# Speed. Connections have to ramp up before a rate means something.
_MAX_BYTES = 128 * 1024**2
_READ_LIMIT_S = 5.0
_MIN_TELLING_S = 1.0  # a shorter read says little about the rate
_SLOW_BYTES_PER_S = 20e6

_TIER_LIMIT_S = 5.0
_MIN_FREE_BYTES = 1 << 30  # on the disk of the tier's cache
_COMPARE = "shardcache cluster status --nodes /etc/shardcache/tier/nodes   # compares all nodes"


async def probe(context: Context) -> list[Finding]:
    """Probe one shard of each store, one store after another.

    Concurrent measurements would share the bandwidth.
    """
    if context.settings is None:
        return [
            skipped("without valid options, object stores cannot be probed as the daemon would"),
        ]
    with _environment_of(context) as owner:
        stores = _Stores(context.settings, owner, quick=context.quick)
        try:
            targets = context.urls or _targets(context, context.settings)
            found = []
            for url in targets:
                findings = await stores.findings(url)
                found += [finding.named("", url) for finding in findings]
        finally:
            await stores.origins.close()
    return found or [
        skipped("nothing to probe: no url given, nothing cached, no [[origin]] table; add a URL"),
    ]


@contextmanager
def _environment_of(context: Context) -> Iterator[str]:
    """Use the daemon's variables of stores and credentials, if they may be read.

    Yield whose credentials these are.
    """
    if context.environment is None:
        yield f"{me()}'s own"
        return
    own = dict(os.environ)
    try:
        for name in context.store_variables(own):
            del os.environ[name]
        os.environ.update(context.environment)
        yield f"the daemon's, run as {user_name(context.uid or 0)}"
    finally:
        os.environ.clear()
        os.environ.update(own)


def _targets(context: Context, settings: Settings) -> list[str]:
    """Return a url for each store: a cached shard's, else what a `match` can list. Blocks."""
    found = {}
    for table in settings.origin:
        place = _place(table.match)
        if place:
            found[store_of(place)] = place
    if context.status is not None:
        with closing(AdminClient(context.socket).shards("")) as cached:
            for row in islice(cached, _MAX_CACHED):
                url = row["url"]
                # Neither one whose signature is redacted, nor one in another process's memory.
                if HIDDEN not in url and protocol_of(url) != "memory":
                    found[store_of(url)] = url
    return list(found.values())


def _place(match: str) -> str | None:
    """Return the listable part of a table's prefix.

    None for a whole protocol, and for http, which has no listings.
    """
    _, separator, path = match.partition("://")
    if not separator or not path.strip("/") or protocol_of(match) in WEB:
        is_file = is_shard(match) or is_index(match)
        return match if is_file else None
    if "/" not in path:  # a whole bucket
        return f"{match}/"
    return match[: match.rindex("/") + 1]


class _Stores:
    """The object stores as a daemon with these settings reaches them.

    Args:
        owner: whose credentials these are, for findings.
    """

    def __init__(self, settings: Settings, owner: str, *, quick: bool) -> None:
        self._settings = settings
        self._owner = owner
        self._quick = quick
        self._allow = AllowList(settings.allow)
        self._peer = Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))
        self.origins = Origins(
            settings.origin,
            max_connections=settings.max_connections,
            redirect_guard=self._allow,
        )

    async def findings(self, url: str) -> list[Finding]:
        """Return the findings for a url, up to the first failure."""
        found: list[Finding] = []
        check = "origin.reach"
        try:
            self._allow.check(url, self._peer)
            if protocol_of(url) in STORES:
                check = "origin.credentials"
                if source := await self.origins.origin(url).credentials(url):
                    found.append(ok(f"{source} ({self._owner})").named(check))
                check = "origin.reach"
            obj = await self._object(url)
            origin = self.origins.origin(obj.url)
            found.append((await _reach(origin, obj)).named(check))
            if obj.size_bytes and not self._quick:
                check = "origin.speed"
                found.append((await _speed(origin, obj, self._settings)).named(check))
        except ShardcacheError as exn:
            table = self.origins.table(url)
            found.append(failure(exn, url, table=table, environment=os.environ).named(check))
        return found

    async def _object(self, url: str) -> RemoteObject:
        """Return one shard that a url, a pattern or an index file names.

        Raises as `expand` and `Origin.stat`.
        """
        try:
            async with asyncio.timeout(_LIMIT_S):
                shards = await expand(url, self.origins, lambda _count: None)
                shard = shards[0].url
                self._allow.check(shard, self._peer)
                return await self.origins.origin(shard).stat(shard)
        except TimeoutError:
            raise OriginUnavailableError(
                "the object store did not answer, or did not finish its listing, "
                f"within {_LIMIT_S:g} s",
                url=url,
                remedy="give the url of one shard; for training, create an index file once: "
                "shardcache index",
            ) from None


async def _reach(origin: Origin, obj: RemoteObject) -> Finding:
    """Measure the time to the first byte of an existing object."""
    done_bytes, first_byte_s, _ = await _read(origin, obj, 1, _FIRST_BYTES, _FIRST_BYTES)
    if obj.size_bytes and not done_bytes:
        raise OriginUnavailableError(
            "the object store lists the object but sends none of its bytes",
            url=obj.url,
        )
    if obj.ranges:  # the first request had to connect
        _, first_byte_s, _ = await _read(origin, obj, 1, _FIRST_BYTES, _FIRST_BYTES)
    found = (
        f"first byte after {duration(first_byte_s)}; tried with a shard of {size(obj.size_bytes)}"
    )
    figures = {"first_byte_s": round(first_byte_s, 4), "size_bytes": float(obj.size_bytes)}
    if not obj.ranges:
        cause = (
            "the server ignores range requests, "
            "so each shard takes one connection and cannot be resumed"
        )
        remedy = "serve the shards from a server with range support, such as nginx"
        return warning(found, cause, remedy, **figures)
    if first_byte_s >= _SLOW_FIRST_BYTE_S:
        cause = "the object store is far away or busy; more concurrent requests make up for it"
        remedy = "shardcache serve --max-connections 32 --shard-connections 16"
        return warning(found, cause, remedy, **figures)
    return ok(found, "", "", **figures)


async def _speed(origin: Origin, obj: RemoteObject, settings: Settings) -> Finding:
    """Measure the rate over all connections, for a few seconds."""
    connections = settings.shard_connections
    done_bytes, _, elapsed_s = await _read(origin, obj, connections, settings.part_size, _MAX_BYTES)
    rate = done_bytes / elapsed_s
    figures = {
        "bytes_per_s": round(rate),
        "read_bytes": done_bytes,
        "elapsed_s": round(elapsed_s, 3),
    }
    amount = f"{size(done_bytes)} in {duration(elapsed_s)}"
    found = f"{size(rate)}/s over up to {connections} connections ({amount})"
    if rate >= _SLOW_BYTES_PER_S or elapsed_s < _MIN_TELLING_S:
        return ok(found, "", "", **figures)
    cause = "training that reads faster than this will wait for the network"
    remedy = (
        "ethtool IFACE | grep Speed   # then look for a proxy, and check the object store's region"
    )
    return warning(found, cause, remedy, **figures)


async def _read(
    origin: Origin,
    obj: RemoteObject,
    connections: int,
    part_bytes: int,
    max_bytes: int,
) -> tuple[int, float, float]:
    """Read and discard the first bytes of an object, until the time limit.

    Without range requests, all of it is read.

    Returns:
        The bytes that arrived, and the seconds until the first and the last.

    Raises the first error.
    """
    step = obj.size_bytes
    stop = obj.size_bytes
    if obj.ranges:
        step = part_bytes
        stop = min(obj.size_bytes, max_bytes)
    starts = iter(range(0, stop, max(1, step)))  # shared by all connections
    done_bytes = 0
    first_byte_s = 0.0
    began_s = time.monotonic()

    def received(count: int) -> None:
        nonlocal done_bytes, first_byte_s
        if not done_bytes:
            first_byte_s = time.monotonic() - began_s
        done_bytes += count

    async def pull() -> None:
        for start in starts:
            part = Parts(os.devnull, None, step, start, min(step, obj.size_bytes - start))
            await origin.fetch(obj, part, Flow(received))

    with suppress(TimeoutError):  # the bytes received so far count
        try:
            async with asyncio.timeout(_READ_LIMIT_S), asyncio.TaskGroup() as group:
                for _ in range(connections):
                    group.create_task(pull())
        except ExceptionGroup as exn:
            # The exception of a task may be a group itself.
            error: Exception = exn
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise error from None
    return done_bytes, first_byte_s, time.monotonic() - began_s


# The cluster's tier, where an [[origin]] table names one


def tier_bypasses(context: Context) -> list[Finding]:
    """Name the origins that have a tier and cannot use it."""
    found = []
    tables = () if context.settings is None else context.settings.origin
    for table in tables:
        reason = reason_to_bypass(table) if table.tier else None
        if reason:
            remedy = (
                f"remove `tier` from the [[origin]] table of {table.match}, "
                "or the option that prevents it"
            )
            found.append(warning(f"{table.match} bypasses the tier {table.tier}", reason, remedy))
    return found


def tier_reach(context: Context) -> list[Finding]:
    """Ask this node's nginx; `cluster status` compares all nodes."""
    tables = () if context.settings is None else context.settings.origin
    addresses = dict.fromkeys(table.tier for table in tables if table.tier)
    return [finding for address in addresses for finding in _look(address, context.uid)]


def _look(address: str, uid: int | None) -> Iterator[Finding]:
    """Look at the nginx of a daemon that runs as `uid`."""
    try:
        own = page(address, PEERS, _TIER_LIMIT_S, uid)
        figures = page(address, STATUS, _TIER_LIMIT_S, uid)
        if own is None:
            raise ValueError("it is not the nginx of a tier")
    except PermissionError:
        yield skipped(f"only the daemon's user and root reach the tier at {address}")
        return
    except (OSError, ValueError) as exn:
        cause = f"{exn}; shards come from the object store"
        yield failed(
            f"the tier at {address} does not answer", cause, "systemctl status shardcache-tier"
        )
        return
    view = f"nginx at {address} is one of {own['peers']} nodes, digest {own['digest']}"
    if not figures:
        yield warning(view, "it was started without `shardcache cluster run`: no figures", _COMPARE)
    elif figures["free_bytes"] < _MIN_FREE_BYTES:
        cause = f"{size(figures['free_bytes'])} are free on its disk: parts are evicted early"
        yield warning(view, cause, "lower --max-size of the tier, or the daemon's --capacity")
    else:
        yield ok(
            f"{view}; {size(figures['cached_bytes'])} cached, {size(figures['free_bytes'])} free"
        )
    figures = figures or {}
    if reason := figures.get("stale"):
        yield failed(
            "this node uses an old list of nodes, or old certificates", str(reason), _COMPARE
        )
    if expiring := expiry_warning(figures.get("certificate_expires_s")):
        cause = "without one, no other node gets shards from it, nor it from them"
        yield warning(
            f"this node: {expiring}",
            cause,
            "shardcache cluster certificates; then copy the nodes' folders",
        )
