"""Probe of one origin: access rules, proxy, clock, credentials and performance."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import getproxies

from shardcache.access.protocols import S3, WEB
from shardcache.access.rules import AllowList, Peer
from shardcache.access.urls import protocol_of
from shardcache.cache.operations.origin_probe.clock import clock
from shardcache.cache.operations.origin_probe.findings import Finding, Severity, of_error, ok, warning
from shardcache.cache.operations.origin_probe.reach import Pull, reach, speed, stat
from shardcache.cache.operations.origin_probe.targets import ProbeTarget, shard_of
from shardcache.config import OriginTable, Settings
from shardcache.errors import AccessDeniedError, NotAllowedError, ShardcacheError
from shardcache.origin.http_semantics import proxy_of
from shardcache.origin.registry import Origins
from shardcache.redact import redact

_FEW_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """Configuration for probing origins: settings, requesting user and credentials.

    Attributes:
        settings: the daemon's settings, or those that it would have.
        origins: access to the origins.
        allow: rules for the urls that may be fetched.
        peer: the requesting user. An untrusted user learns only whether a shard can be read: not the proxy, clock and
            credentials, which are the daemon's own, and not the rate, as measuring it takes bandwidth.
        owner: owner of the credentials, as a phrase.
        quick: skip the rate measurement for everyone.
    """

    settings: Settings
    origins: Origins
    allow: AllowList
    peer: Peer
    owner: str
    quick: bool

    async def findings(self, target: ProbeTarget) -> AsyncGenerator[Finding, None]:
        """Yield the findings for one target, up to the first failure that makes further checks pointless."""
        url, table = target.url, self.origins.rule(target.url)
        try:
            self.allow.check(url, self.peer)
            if self.peer.is_trusted:
                async for check, finding in self._before(url, table):
                    yield finding.named(check, url)
            shard = await shard_of(target, self.origins)
            self.allow.check(shard, self.peer)
            origin = self.origins.origin(shard)
            obj = await stat(origin, shard)
            reached = await reach(origin, obj)
            yield reached.named("origin.reach", url)
            if obj.size_bytes and reached.state is not Severity.FAILED and self.peer.is_trusted and not self.quick:
                pull = Pull(self.settings.shard_connections, self.settings.part_size)
                yield (await speed(origin, obj, pull)).named("origin.speed", url)
        except ShardcacheError as exn:
            shown = table if self.peer.is_trusted else OriginTable.model_validate({"match": ""})
            why, command = _why(exn, target, shown), _command(exn, url, shown)
            yield of_error(exn, why, command=command).named("origin.reach", url)

    async def _before(self, url: str, table: OriginTable) -> AsyncIterator[tuple[str, Finding]]:
        """Yield the names and findings of the checks that need no access to the shards."""
        protocol = protocol_of(url)
        if protocol in WEB:
            parts = urlsplit(url)
            server = f"{parts.scheme}://{parts.netloc}/"
            yield "network.proxy", _proxy(server, signs=False)
            yield "origin.clock", await clock(server, signs=False)
        if protocol in S3.names:
            async for row in self._before_s3(url, table):
                yield row

    async def _before_s3(self, url: str, table: OriginTable) -> AsyncIterator[tuple[str, Finding]]:
        # Importing an SDK takes a second.
        from shardcache.cache.operations.origin_probe.credentials import credentials
        from shardcache.origin.s3_sdk import SdkSessions

        sessions = SdkSessions(table, _FEW_CONNECTIONS)
        try:
            async with sessions.use(url) as fs:
                endpoint = str(fs.s3.meta.endpoint_url)
            yield "network.proxy", _proxy(endpoint, signs=True)
            yield "origin.clock", await clock(endpoint, signs=True)
            yield "origin.credentials", await credentials(sessions, table, url, self.owner)
        finally:
            await sessions.close()


def _why(error: ShardcacheError, target: ProbeTarget, table: OriginTable) -> str:
    way = f", accessed through the [[origin]] table for {table.match}" if table.match else ""
    return f"{error.code}: the url is {target.source}{way}"


def _command(error: ShardcacheError, url: str, table: OriginTable) -> str:
    """Return a command that tests access without shardcache, or allows it; empty if none would help."""
    if isinstance(error, NotAllowedError):
        return f"shardcache serve --allow {shlex.quote(redact(url))}"
    if isinstance(error, AccessDeniedError):
        return ""
    if protocol_of(url) in WEB:
        return f"curl -I {shlex.quote(redact(url))}"
    if protocol_of(url) not in S3.names:
        return ""
    options = {"--endpoint-url": table.endpoint_url, "--profile": table.profile, "--region": table.region}
    words = [word for option, value in options.items() if value for word in (option, value)]
    words += ["--no-sign-request"] if table.anon else []
    return shlex.join(["aws", "s3", "ls", *words, redact(url[: url.rindex("/") + 1])])


def _proxy(server: str, *, signs: bool) -> Finding:
    parts = urlsplit(server)
    proxy = proxy_of(server)
    if proxy is None:
        is_bypassed = parts.scheme in getproxies()
        return ok(f"bypassed for {parts.netloc} by $no_proxy" if is_bypassed else f"none for {parts.netloc}")
    cause = "all bytes pass through it" + (", and S3 is read by the slower of two methods" if signs else "")
    host = parts.netloc.removesuffix(f":{parts.port}")
    remedy = f'export no_proxy="$no_proxy,{host}"   # for the daemon, if a direct route exists'
    return warning(f"{parts.netloc} is reached through {proxy}", cause, remedy)
