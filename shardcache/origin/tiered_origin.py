"""Origins that have a cluster's tier in front of them.

The tier is an optional cache that the nodes of a cluster share. While an origin is unavailable, the
tier may still have its objects. `TieredOrigin` then returns their last known versions, so that they
can be read from the tier.
"""

import asyncio
from dataclasses import replace

from shardcache.origin.base import Setup
from shardcache.origin.deferred_origin import DeferredOrigin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.tier_state import TierState
from shardcache.shared.exceptions import OriginError, OriginUnavailableError
from shardcache.shared.tarindex.key_splits import key_split_in

_MAX_KNOWN = 10_000  # number of objects whose versions are remembered for an outage
_VERSION_TIMEOUT_S = 5.0  # limit on the time in which the tier answers a question about a version


class TieredOrigin(DeferredOrigin):
    """An origin behind a tier, which may have an object's parts while the origin fails.

    `fetch` requests parts from the origin itself, and `ask_tier` requests them from the tier.
    """

    def __init__(self, setup: Setup, tier: TierState) -> None:
        super().__init__(setup)
        self.tier: TierState = tier
        # By url: the object as it was last known. The oldest entry is first.
        self._last_known: dict[str, RemoteObject] = {}

    async def stat(self, url: str, first_bytes: int = 0) -> RemoteObject:
        """As `Origin.stat`; while the origin is unavailable, return the last known version.

        The tier may have the parts of this version. For each part, the tier itself checks whether
        the request is permitted.
        """
        try:
            # `first_bytes` is not passed on: all bytes are to come through the tier.
            current = await super().stat(url)
        except OriginUnavailableError:
            last_known = self._last_known.get(url) or await self._version_in_tier(url)
            if last_known is None:
                raise
            return last_known
        # The tier caches single parts, so each part is requested separately.
        obj = replace(current, is_joinable=False)
        self._remember(obj, url)
        return obj

    def _remember(self, obj: RemoteObject, url: str) -> None:
        """Keep the present version of an object; forget the oldest if there are too many."""
        self._last_known.pop(url, None)  # so that the object is added at the end
        self._last_known[url] = obj
        if len(self._last_known) > _MAX_KNOWN:
            oldest = next(iter(self._last_known))
            del self._last_known[oldest]

    async def _version_in_tier(self, url: str) -> RemoteObject | None:
        """Return the version that the store lately permitted the tier to serve.

        Returns None if the tier knows no version, or fails as well.
        """
        route = self.tier.version_route()
        if route is None:  # the tier has failed lately
            return None
        origin = await self.loaded()
        try:
            async with asyncio.timeout(_VERSION_TIMEOUT_S):
                object_url, _ = key_split_in(url)
                obj = await origin.ask_tier_for_version(route, object_url)
        except (OriginError, TimeoutError):
            return None
        if obj is None:
            return None
        return replace(obj, url=url)
