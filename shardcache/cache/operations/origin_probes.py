"""Origin probes on request, with the daemon's own credentials and connections, for users allowed to fetch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import aclosing

from shardcache.access.rules import AllowList, Peer
from shardcache.cache.catalog.manifests import Manifests
from shardcache.cache.operations.maintenance import Maintenance
from shardcache.cache.operations.origin_probe.targets import ProbeTarget, targets
from shardcache.cache.operations.origin_probe.trial import Trial
from shardcache.cache.operations.rounds import Tell
from shardcache.config import Settings
from shardcache.errors import ConfigError
from shardcache.origin.registry import Origins
from shardcache.units import user_name

MAX_URLS = 16
"""Limit on the urls of one request."""

# Number of cached shards searched for origins.
_MAX_ROWS = 10_000


class Probing:
    """Probes origins, for one request at a time: concurrent measurements would share the bandwidth."""

    def __init__(
        self, settings: Settings, origins: Origins, allow: AllowList, manifests: Manifests, upkeep: Maintenance
    ) -> None:
        self._settings = settings
        self._origins = origins
        self._allow = allow
        self._manifests = manifests
        self._maintenance = upkeep
        self._turn = asyncio.Lock()

    async def probe(self, urls: Sequence[str], peer: Peer, tell: Tell, *, quick: bool) -> None:
        """Report findings, one at a time, for `urls`, or for every known origin that the user may see.

        Raises NotAllowedError before any request to an origin, ConfigError for too many urls.
        """
        if len(urls) > MAX_URLS:
            raise ConfigError(f"more than {MAX_URLS} urls to probe", remedy="probe fewer of them at a time")
        await asyncio.to_thread(self._manifests.check, urls, peer)
        trial = Trial(
            self._settings, self._origins, self._allow, peer, f"the daemon's, run as {user_name(os.getuid())}", quick
        )
        async with self._turn:
            for target in await self._targets(urls, peer):
                async with aclosing(trial.findings(target)) as findings:
                    async for finding in findings:
                        await tell(finding.to_json())

    async def _targets(self, urls: Sequence[str], peer: Peer) -> list[ProbeTarget]:
        if urls:
            return targets(urls, ())
        cached: list[str] = []
        async with aclosing(self._maintenance.shards(sight=lambda url: self._allow.shows(url, peer))) as shards:
            async for _, facts in shards:
                cached.append(facts.url)
                if len(cached) == _MAX_ROWS:
                    break
        found = targets((), self._settings.origin, cached)
        return [target for target in found if self._allow.shows(target.url, peer)]
