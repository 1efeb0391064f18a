"""Origins that have a cluster's tier in front of them."""

import asyncio
from dataclasses import replace

from shardcache.errors import OriginError, OriginUnavailableError
from shardcache.origin.base import Setup
from shardcache.origin.deferred_origin import DeferredOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.tier_state import TierState
from shardcache.tarindex.key_splits import key_split_in

_MAX_KNOWN = 10_000  # number of objects with versions that are remembered for an outage
_VERSION_LIMIT_S = 5.0  # for the tier's answer to the question which version it knows


class TieredOrigin(DeferredOrigin):
    """An origin behind a tier, which may have an object's parts while the origin fails.

    Its `fetch` bypasses the tier; `ask_tier` does not.
    """

    def __init__(self, setup: Setup, tier: TierState) -> None:
        super().__init__(setup)
        self.tier: TierState = tier
        self._known: dict[str, RemoteObject] = {}  # objects by url, oldest first

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; while the origin is unavailable, the version that was last known.

        The tier may have its parts; for each, it checks whether the request is permitted.
        """
        try:
            current = await super().stat(url)
        except OriginUnavailableError:
            last_known = self._known.get(url) or await self._permitted_by_tier(url)
            if last_known is None:
                raise
            return last_known
        obj = replace(current, joinable=False)  # the tier caches single parts
        self._remember(obj, url)
        return obj

    def _remember(self, obj: RemoteObject, url: str) -> None:
        """Keep an object as the newest known; forget the oldest of too many."""
        self._known.pop(url, None)
        self._known[url] = obj
        if len(self._known) > _MAX_KNOWN:
            oldest = next(iter(self._known))
            del self._known[oldest]

    async def _permitted_by_tier(self, url: str) -> RemoteObject | None:
        """Return the version that the tier knows while the store fails.

        None if it knows none, or fails, too.
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
