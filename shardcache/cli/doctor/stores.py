"""Each store that is tried: may it be fetched from, by which way, as whom, and how well does it answer."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from shardcache.cache.allow import AllowList, Peer
from shardcache.cli.doctor import clock, reach
from shardcache.cli.doctor.case import Case
from shardcache.cli.doctor.findings import Finding, of_error, ok, skipped, warning
from shardcache.cli.doctor.reach import Pull
from shardcache.cli.doctor.targets import Target, shard_of, targets
from shardcache.config import OriginTable, Settings
from shardcache.errors import ShardcacheError
from shardcache.origin.registry import Origins
from shardcache.origin.urls import WEB, protocol_of
from shardcache.redact import redact

_S3 = ("s3", "s3a")
_FEW_CONNECTIONS = 4


async def examine(case: Case) -> list[Finding]:
    """Try every target with the daemon's own code, one after another: two measured at once would share the line."""
    if case.settings is None:
        return [skipped("store.reach", "without the options, no store can be tried as the daemon would")]
    if not case.is_operators and not case.urls:
        return [skipped("store.reach", "the daemon asks with its own credentials; add a URL to try it with yours")]
    found = await targets(case)
    if not found:
        return [skipped("store.reach", "no url was given, nothing is cached, no table names a bucket: add a URL")]
    return [finding for target in found async for finding in Trial(case, case.settings, target).findings()]


class Trial:
    """One target, tried with connections of its own."""

    def __init__(self, case: Case, settings: Settings, target: Target) -> None:
        self._case = case
        self._settings = settings
        self._target = target
        self._subject = redact(target.url)
        self._allow = AllowList(settings.allow)
        self._peer = Peer(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))

    async def findings(self) -> AsyncIterator[Finding]:
        """Yield what is found, until something makes all further questions idle."""
        origins = Origins(self._settings.origin, max_connections=self._settings.max_connections, fence=self._allow)
        url, table = self._target.url, origins.rule(self._target.url)
        try:
            self._allow.check(url, self._peer)
            async for finding in self._before(table):
                yield finding
            shard = await shard_of(self._target, origins)
            self._allow.check(shard, self._peer)
            for finding in await self._answers(origins, shard):
                yield finding
        except ShardcacheError as exn:
            yield of_error("store.reach", exn, self._why(exn, table), subject=self._subject)
        finally:
            await origins.close()

    async def _before(self, table: OriginTable) -> AsyncIterator[Finding]:
        """Look at what can be told without the store's consent."""
        url, protocol = self._target.url, protocol_of(self._target.url)
        if protocol in WEB:
            parts = urlsplit(url)
            server = f"{parts.scheme}://{parts.netloc}/"
            yield _proxy(server, self._subject, signs=False)
            yield await clock.examine(server, self._subject, signs=False)
        if protocol in _S3:
            async for finding in self._before_s3(table):
                yield finding

    async def _before_s3(self, table: OriginTable) -> AsyncIterator[Finding]:
        from shardcache.cli.doctor import credentials
        from shardcache.origin.s3_session import Sessions

        sessions = Sessions(table, _FEW_CONNECTIONS)
        try:
            async with sessions.use(self._target.url) as fs:
                endpoint = str(fs.s3.meta.endpoint_url)
            yield _proxy(endpoint, self._subject, signs=True)
            yield await clock.examine(endpoint, self._subject, signs=True)
            yield await credentials.examine(self._case, sessions, table, self._subject)
        finally:
            await sessions.close()

    async def _answers(self, origins: Origins, shard: str) -> list[Finding]:
        origin, settings = origins.origin(shard), self._settings
        pull = None if self._case.quick else Pull(settings.shard_connections, settings.part_size)
        return await reach.examine(origin, await reach.stat(origin, shard), self._subject, pull)

    def _why(self, error: ShardcacheError, table: OriginTable) -> str:
        way = f", reached by the [[origin]] table for {table.match}" if table.match else ""
        return f"{error.code}: the url is {self._target.source}{way}"


def _proxy(server: str, subject: str, *, signs: bool) -> Finding:
    name, parts = "network.proxy", urlsplit(server)
    proxy = getproxies().get(parts.scheme)
    if not proxy:
        return ok(name, f"none on the way to {parts.netloc}", subject=subject)
    if proxy_bypass(parts.hostname or ""):
        return ok(name, f"$no_proxy lets {parts.netloc} be reached directly", subject=subject)
    cause = "all bytes pass through it" + (", and the slower of two ways to read S3 is taken" if signs else "")
    host = parts.hostname or parts.netloc
    remedy = f'export no_proxy="$no_proxy,{host}"   # for the daemon, where a direct way exists'
    return warning(name, f"{parts.netloc} is reached by {proxy}", cause, remedy, subject=subject)
