"""Recent answers of origins about objects, for clients that request the same objects often.

The S3 endpoint needs the version and size of an object for each range that a client reads of it.
`Objects` looks them up here, once the rules have permitted the url.
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from shardcache.cache.listings.manifests import Manifests
from shardcache.origin.objects import RemoteObject
from shardcache.store.disk.file_operations import modified_s
from shardcache.store.keys import place_of, shard_key
from shardcache.store.store import Store

_MAX_KNOWN = 10_000  # number of objects that are remembered, each of which takes some 300 bytes


@dataclass(slots=True, eq=False)
class KnownObjects:
    """Objects as their origins have them, or had them at most `_ttl_s` seconds ago.

    `_known` has the answers by url, the oldest first. `_locks` has the locks of urls whose origins
    are being asked.
    """

    _manifests: Manifests
    _store: Store
    _ttl_s: float
    _known: OrderedDict[str, RemoteObject] = field(default_factory=OrderedDict, init=False)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary,
        init=False,
    )

    async def current(self, url: str) -> RemoteObject:
        """Return an object; ask its origin if there is no answer that is recent enough.

        Concurrent callers share one request. Raises as `Manifests.stat` does, which returns a
        cached object as it is cached if the origin fails.
        """
        known = self.fresh(url)
        if known is not None:
            return known
        async with self._locks.setdefault(url, asyncio.Lock()):
            known = self.fresh(url)  # another caller may have asked while this one waited
            if known is None:
                known = await self._dated(await self._manifests.stat(url))
                self._remember(known)
        return known

    def forget(self, url: str) -> None:
        """Forget the answer about an object, so that the next request asks the origin."""
        self._known.pop(url, None)

    def fresh(self, url: str) -> RemoteObject | None:
        """Return an object from a recent answer; None if the origin has to be asked."""
        known = self._known.get(url)
        if known is None or time.monotonic() - known.reported_s > self._ttl_s:
            return None
        return known

    def _remember(self, obj: RemoteObject) -> None:
        """Keep an answer, and forget the oldest if there are too many."""
        self._known[obj.url] = obj
        self._known.move_to_end(obj.url)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _dated(self, obj: RemoteObject) -> RemoteObject:
        """Return an object with its time of modification.

        If the origin does not report the time, it is the time at which the object was fetched, or
        the present if the object is not cached.
        """
        if obj.modified_s is not None:
            return obj
        key = shard_key(place_of(obj.url, is_file=True), obj.version)
        # The bytes of any object are cached under the path that a shard's tar would have.
        path = self._store.layout.tar(key)
        fetched_s = await asyncio.to_thread(modified_s, path)
        return replace(obj, modified_s=time.time() if fetched_s is None else fetched_s)
