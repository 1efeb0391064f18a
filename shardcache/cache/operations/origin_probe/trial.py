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
from shardcache.cache.operations.origin_probe import clock, reach
from shardcache.cache.operations.origin_probe.findings import Finding, of_error, ok, warning
from shardcache.cache.operations.origin_probe.reach import Pull
from shardcache.cache.operations.origin_probe.targets import Target, shard_of
from shardcache.config import OriginTable, Settings
from shardcache.errors import NotAllowedError, ShardcacheError
from shardcache.origin.proxy import proxy_of
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

    async def findings(self, target: Target) -> AsyncGenerator[Finding, None]:
        """Yield the findings for one target, up to the first failure that makes further checks pointless."""
        url, table, subject = target.url, self.origins.rule(target.url), redact(target.url)
        try:
            self.allow.check(url, self.peer)
            if self.peer.is_trusted:
                async for finding in self._before(url, table, subject):
                    yield finding
            shard = await shard_of(target, self.origins)
            self.allow.check(shard, self.peer)
            origin = self.origins.origin(shard)
            for finding in await reach.examine(origin, await reach.stat(origin, shard), subject, self._pull()):
                yield finding
        except ShardcacheError as exn:
            shown = table if self.peer.is_trusted else OriginTable.model_validate({"match": ""})
            why, command = _why(exn, target, shown), _command(exn, url, shown)
            yield of_error("store.reach", exn, why, subject=subject, command=command)

    def _pull(self) -> Pull | None:
        if self.quick or not self.peer.is_trusted:
            return None
        return Pull(self.settings.shard_connections, self.settings.part_size)

    async def _before(self, url: str, table: OriginTable, subject: str) -> AsyncIterator[Finding]:
        """Run the checks that need no access to the shards."""
        protocol = protocol_of(url)
        if protocol in WEB:
            parts = urlsplit(url)
            server = f"{parts.scheme}://{parts.netloc}/"
            yield _proxy(server, subject, signs=False)
            yield await clock.examine(server, subject, signs=False)
        if protocol in S3.names:
            async for finding in self._before_s3(url, table, subject):
                yield finding

    async def _before_s3(self, url: str, table: OriginTable, subject: str) -> AsyncIterator[Finding]:
        from shardcache.cache.operations.origin_probe import credentials  # importing an SDK takes a second
        from shardcache.origin.s3.session import Sessions

        sessions = Sessions(table, _FEW_CONNECTIONS)
        try:
            async with sessions.use(url) as fs:
                endpoint = str(fs.s3.meta.endpoint_url)
            yield _proxy(endpoint, subject, signs=True)
            yield await clock.examine(endpoint, subject, signs=True)
            yield await credentials.examine(sessions, table, subject, self.owner)
        finally:
            await sessions.close()


def _why(error: ShardcacheError, target: Target, table: OriginTable) -> str:
    way = f", accessed through the [[origin]] table for {table.match}" if table.match else ""
    return f"{error.code}: the url is {target.source}{way}"


def _command(error: ShardcacheError, url: str, table: OriginTable) -> str:
    """Return a command that tests access without shardcache, or allows it; empty if none is known."""
    if isinstance(error, NotAllowedError):
        return f"shardcache serve --allow {shlex.quote(redact(url))}"
    if protocol_of(url) in WEB:
        return f"curl -I {shlex.quote(redact(url))}"
    if protocol_of(url) not in S3.names:
        return ""
    options = {"--endpoint-url": table.endpoint_url, "--profile": table.profile, "--region": table.region}
    words = [word for option, value in options.items() if value for word in (option, value)]
    words += ["--no-sign-request"] if table.anon else []
    return shlex.join(["aws", "s3", "ls", *words, redact(url[: url.rindex("/") + 1])])


def _proxy(server: str, subject: str, *, signs: bool) -> Finding:
    name, parts = "network.proxy", urlsplit(server)
    proxy = proxy_of(server)
    if proxy is None:
        is_bypassed = parts.scheme in getproxies()
        found = f"bypassed for {parts.netloc} by $no_proxy" if is_bypassed else f"none for {parts.netloc}"
        return ok(name, found, subject=subject)
    cause = "all bytes pass through it" + (", and S3 is read by the slower of two methods" if signs else "")
    host = parts.netloc.removesuffix(f":{parts.port}")
    remedy = f'export no_proxy="$no_proxy,{host}"   # for the daemon, if a direct route exists'
    return warning(name, f"{parts.netloc} is reached through {proxy}", cause, remedy, subject=subject)
