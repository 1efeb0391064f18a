"""Checks of the object stores for `shardcache doctor`, by requests from this process.

`runner` calls `probe_stores`. A store is named by the beginning of its urls, such as "s3://bucket".
It is checked in three steps: its credentials, the time to the first byte of one shard, and the rate
of a longer read. An origin is the client of a store. If this user may read the environment of the
running daemon, the daemon's variables about stores and credentials are used in place of the user's.

An [[origin]] table of the config file has options for the urls that begin with its `match`. A
finding is one line of the doctor's report; its name is the check's, such as "origin.reach".
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from typing import NamedTuple

from shardcache.access.protocols import STORES, WEB
from shardcache.access.rules import AllowList, Peer
from shardcache.access.urls import protocol_of, store_of
from shardcache.cli.admin_client import AdminClient
from shardcache.cli.doctor.causes import store_failure
from shardcache.cli.doctor.context import (
    Context,
    Finding,
    measured,
    ok,
    skipped,
    store_variables,
    this_user,
    warning,
)
from shardcache.config.settings import Settings
from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.patterns.expansion import expand
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import OriginUnavailableError, ShardcacheError
from shardcache.shared.units import duration, size, user_name
from shardcache.shared.urls.url_names import is_index, is_shard
from shardcache.shared.wording.redact import HIDDEN
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.parts import Parts

_LIMIT_S = 20.0  # time limit for a listing and the version of one object
_MAX_CACHED = 10_000  # maximum number of cached shards that are searched for stores

# The measurement of the time to the first byte reads this much.
_FIRST_BYTES = 64 * 1024
_SLOW_FIRST_BYTE_S = 1.0

# Limits on the measurement of the rate.
_MAX_BYTES = 128 * 1024**2
_READ_LIMIT_S = 5.0
# A shorter read says little about the rate, since connections take time to reach their speed.
_MIN_ELAPSED_S = 1.0
_SLOW_BYTES_PER_S = 20e6


async def probe_stores(context: Context) -> list[Finding]:
    """Probe one shard of each store.

    Stores are probed one after another, since concurrent measurements would share the bandwidth.
    """
    if context.settings is None:
        return [
            skipped("without valid options, object stores cannot be probed as the daemon would"),
        ]
    urls = context.urls or _one_url_per_store(context, context.settings)
    if not urls:
        return [
            skipped(
                "nothing to probe: no url given, nothing cached, no [[origin]] table; add a URL",
            ),
        ]
    findings: list[Finding] = []
    with _daemon_environment(context) as owner:
        prober = _StoreProber(context.settings, owner, quick=context.quick)
        try:
            for url in urls:
                url_findings = await prober.probe(url)
                findings += [finding.about(url) for finding in url_findings]
        finally:
            await prober.close()
    return findings


@contextmanager
def _daemon_environment(context: Context) -> Iterator[str]:
    """Put the daemon's variables about stores and credentials into this process's environment.

    The environment stays as it is if the daemon's may not be read. Yields the owner of the
    credentials, in words.
    """
    if context.environment is None:
        yield f"{this_user()}'s own"
        return
    original = dict(os.environ)
    uid = context.uid or 0  # never None here: the user is known if the environment is
    try:
        for name in store_variables(original):
            del os.environ[name]
        os.environ.update(context.environment)
        yield f"the daemon's, run as {user_name(uid)}"
    finally:
        os.environ.clear()
        os.environ.update(original)


def _one_url_per_store(context: Context, settings: Settings) -> list[str]:
    """Return a url for each store that has cached shards or an [[origin]] table. Blocks.

    The url is that of a cached shard if the store has one; otherwise it is made of the table's
    `match`.
    """
    urls = {}  # by store; urls of cached shards replace those of tables
    for table in settings.origin:
        listable = _listable_url(table.match)
        if listable:
            urls[store_of(listable)] = listable
    if context.status is not None:
        # The empty prefix stands for all cached shards.
        with closing(AdminClient(context.socket).shards("")) as cached:
            for shard in islice(cached, _MAX_CACHED):
                url = shard["url"]
                if _can_be_requested(url):
                    urls[store_of(url)] = url
    return list(urls.values())


def _listable_url(match: str) -> str | None:
    """Return a url that can be listed or read, given an [[origin]] table's `match`.

    A `match` is the beginning of the urls to which the table applies. The result is its part up to
    the last slash. It is None for a `match` that has no bucket, such as "s3://". Web servers have
    no listings, so their result is None unless the `match` is the url of one shard or index.
    """
    _, separator, path = match.partition("://")
    is_whole_protocol = not separator or not path.strip("/")
    if is_whole_protocol or protocol_of(match) in WEB:
        is_file = is_shard(match) or is_index(match)
        return match if is_file else None
    if "/" not in path:  # the table matches a whole bucket
        return f"{match}/"
    return match[: match.rindex("/") + 1]


def _can_be_requested(url: str) -> bool:
    """Return True if this process can request a url that the daemon lists."""
    is_redacted = HIDDEN in url
    is_in_daemons_memory = protocol_of(url) == "memory"
    return not (is_redacted or is_in_daemons_memory)


class _StoreProber:
    """Probes object stores as a daemon with these settings reaches them.

    Args:
        settings: the daemon's settings.
        owner: owner of the credentials, in words, for findings.
        quick: True to leave out the measurement of the rate.
    """

    def __init__(self, settings: Settings, owner: str, *, quick: bool) -> None:
        self._settings = settings
        self._owner = owner
        self._quick = quick
        self._allow = AllowList(settings.allow)
        self._peer = Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))
        self._origins = Origins(
            settings.origin,
            max_connections=settings.max_connections,
            redirect_guard=self._allow,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._origins.close()

    async def probe(self, url: str) -> list[Finding]:
        """Return the findings for a url, up to the first failure."""
        findings: list[Finding] = []
        # Before each step, `check` is set to the name that the finding gets if the step fails.
        check = "origin.reach"
        try:
            self._allow.check(url, self._peer)
            if protocol_of(url) in STORES:
                check = "origin.credentials"
                # The source of the credentials, in words; empty if it is unknown.
                source = await self._origins.origin(url).obtain_credentials(url)
                if source:
                    findings.append(ok(f"{source} ({self._owner})").named(check))

            check = "origin.reach"
            shard = await self._find_shard(url)
            origin = self._origins.origin(shard.url)
            first_byte = await _measure_first_byte(origin, shard)
            findings.append(first_byte.named(check))

            if shard.size_bytes and not self._quick:
                check = "origin.speed"
                rate = await _measure_rate(origin, shard, self._settings)
                findings.append(rate.named(check))
        except ShardcacheError as exn:
            table = self._origins.table(url)
            failure = store_failure(exn, url, table=table, environment=os.environ)
            findings.append(failure.named(check))
        return findings

    async def _find_shard(self, url: str) -> RemoteObject:
        """Return one shard that a url, a pattern or an index file names.

        Raises as `expand` and `Origin.stat`.
        """
        try:
            async with asyncio.timeout(_LIMIT_S):
                shards = await expand(url, self._origins)
                shard_url = shards[0].url
                self._allow.check(shard_url, self._peer)
                return await self._origins.origin(shard_url).stat(shard_url)
        except TimeoutError:
            raise OriginUnavailableError(
                "the object store did not answer, or did not finish its listing, "
                f"within {_LIMIT_S:g} s",
                url=url,
                remedy="give the url of one shard; for training, create an index file once: "
                "shardcache index",
            ) from None


async def _measure_first_byte(origin: Origin, obj: RemoteObject) -> Finding:
    """Measure the time to the first byte of an existing object.

    Raises OriginUnavailableError if no byte arrives, and the errors of reading.
    """
    timing = await _read_beginning(origin, obj)
    if obj.size_bytes and not timing.read_bytes:
        raise OriginUnavailableError(
            "the object store lists the object but sends none of its bytes",
            url=obj.url,
        )
    if obj.has_ranges:  # the origin supports range requests
        # The time is measured a second time, since the first request had to connect. Without range
        # requests, this would read the whole object again.
        timing = await _read_beginning(origin, obj)
    first_byte_s = timing.first_byte_s
    shard_size = size(obj.size_bytes)
    found = f"first byte after {duration(first_byte_s)}; tried with a shard of {shard_size}"
    figures = {"first_byte_s": round(first_byte_s, 4), "size_bytes": float(obj.size_bytes)}
    if not obj.has_ranges:
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
    return measured(found, figures)


async def _measure_rate(origin: Origin, obj: RemoteObject, settings: Settings) -> Finding:
    """Measure the rate over as many connections as the daemon uses for a shard."""
    connections = settings.shard_connections
    timing = await _read(
        origin,
        obj,
        connections=connections,
        part_bytes=settings.part_size,
        max_bytes=_MAX_BYTES,
    )
    rate = timing.read_bytes / timing.elapsed_s
    figures = {
        "bytes_per_s": round(rate),
        "read_bytes": timing.read_bytes,
        "elapsed_s": round(timing.elapsed_s, 3),
    }
    amount = f"{size(timing.read_bytes)} in {duration(timing.elapsed_s)}"
    found = f"{size(rate)}/s over up to {connections} connections ({amount})"
    if rate >= _SLOW_BYTES_PER_S or timing.elapsed_s < _MIN_ELAPSED_S:
        return measured(found, figures)
    cause = "training that reads faster than this will wait for the network"
    remedy = (
        "ethtool IFACE | grep Speed   # then look for a proxy, and check the object store's region"
    )
    return warning(found, cause, remedy, **figures)


class _ReadTiming(NamedTuple):
    """Bytes and times of one read.

    Attributes:
        read_bytes: number of bytes that arrived.
        first_byte_s: seconds until the first byte arrived.
        elapsed_s: seconds until the read ended.
    """

    read_bytes: int
    first_byte_s: float
    elapsed_s: float


async def _read_beginning(origin: Origin, obj: RemoteObject) -> _ReadTiming:
    """Read the first bytes of an object in one request."""
    return await _read(
        origin,
        obj,
        connections=1,
        part_bytes=_FIRST_BYTES,
        max_bytes=_FIRST_BYTES,
    )


async def _read(
    origin: Origin,
    obj: RemoteObject,
    *,
    connections: int,
    part_bytes: int,
    max_bytes: int,
) -> _ReadTiming:
    """Read and discard the first bytes of an object, until the time limit.

    From a server without range requests, the whole object is read. Raises the first error.

    Args:
        origin: the origin to read from.
        obj: the object.
        connections: number of requests that run at the same time.
        part_bytes: number of bytes per request.
        max_bytes: number of bytes after which to stop before the time limit.
    """
    if obj.has_ranges:
        stop = min(obj.size_bytes, max_bytes)
    else:
        stop = obj.size_bytes
        part_bytes = max(1, obj.size_bytes)  # an empty object, too, needs a part size
    starts = iter(range(0, stop, part_bytes))  # all connections take their parts from this iterator
    read_bytes = 0
    first_byte_s = 0.0
    start_s = time.monotonic()

    def on_received(count: int) -> None:
        nonlocal read_bytes, first_byte_s
        if not read_bytes:
            first_byte_s = time.monotonic() - start_s
        read_bytes += count

    async def fetch_parts() -> None:
        for start in starts:
            part = Parts(
                path=os.devnull,  # the bytes are discarded
                journal_path=None,
                part_bytes=part_bytes,
                start=start,
                size_bytes=min(part_bytes, obj.size_bytes - start),
            )
            flow = Flow(on_received)
            flow.prompt = True  # otherwise, a short part would be reported only at its end
            await origin.fetch(obj, part, flow)

    with suppress(TimeoutError):  # the bytes received so far count
        try:
            async with asyncio.timeout(_READ_LIMIT_S), asyncio.TaskGroup() as group:
                for _ in range(connections):
                    group.create_task(fetch_parts())
        except ExceptionGroup as exn:
            raise _first_error(exn) from None
    return _ReadTiming(read_bytes, first_byte_s, time.monotonic() - start_s)


def _first_error(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group, whose members may be groups themselves."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
