"""Origins that have a cluster's tier in front of them.

The tier is an optional cache that the nodes of a cluster share. While an origin is unavailable, the
tier may still have objects, and this origin then knows their versions.
"""

import asyncio
from dataclasses import replace

from shardcache.errors import OriginError, OriginUnavailableError
from shardcache.origin.base import Setup
from shardcache.origin.deferred_origin import DeferredOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.tier_state import TierState
from shardcache.tarindex.key_splits import key_split_in

_MAX_KNOWN = 10_000  # number of objects whose versions are remembered for an outage
_VERSION_LIMIT_S = 5.0  # limit on the time of a question to the tier about a version


class TieredOrigin(DeferredOrigin):
    """An origin behind a tier, which may have an object's parts while the origin fails.

    `fetch` requests parts from the origin itself, and `ask_tier` requests them from the tier.
    """

    def __init__(self, setup: Setup, tier: TierState) -> None:
        super().__init__(setup)
        self.tier: TierState = tier
        self._known: dict[str, RemoteObject] = {}  # objects by url, oldest first

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; while the origin is unavailable, return the last known version.

        The tier may have the parts of this version. It checks for each part whether the request is
        permitted.
        """
        try:
            # Without `first_bytes`: all bytes are to come through the tier.
            current = await super().stat(url)
        except OriginUnavailableError:
            last_known = self._known.get(url) or await self._permitted_by_tier(url)
            if last_known is None:
                raise
            return last_known
        # The tier caches single parts, so each part is requested by itself.
        obj = replace(current, joinable=False)
        self._remember(obj, url)
        return obj

    def _remember(self, obj: RemoteObject, url: str) -> None:
        """Keep an object as the newest known; forget the oldest object if there are too many."""
        self._known.pop(url, None)
        self._known[url] = obj
        if len(self._known) > _MAX_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]

    async def _permitted_by_tier(self, url: str) -> RemoteObject | None:
        """Return the version that the store lately permitted the tier to serve.

        Returns None if the tier knows no version, or fails as well.
        """
        route = self.tier.version_route()
        if route is None:
            return None
        origin = await self.loaded()
        try:
            async with asyncio.timeout(_VERSION_LIMIT_S):
                object_url, _ = key_split_in(url)
                obj = await origin.permitted_lately(route, object_url)
        except (OriginError, TimeoutError):
            return None
        return None if obj is None else replace(obj, url=url)
