"""Requests to origins for the present version of cached shards.

If a reader wants the latest version of a shard, `Leasing` has the shard revalidated before it
serves the cached version. An origin is silent from the moment at which a reader has waited
`_GRACE_S` for its answer until a request to it ends within `_TIMEOUT_S`. A signed url has a
signature in its query that permits reading for a time. Its cached bytes are served only to callers
whose signature the origin has accepted.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

from shardcache.access.urls import store_of
from shardcache.cache.planner import Planner
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.shared.exceptions import (
    AccessDeniedError,
    OriginError,
    OriginUnavailableError,
    ShardcacheError,
)
from shardcache.shared.protocol import ShardRef
from shardcache.shared.urls.signed_urls import is_signed
from shardcache.store.keys import place_of, shard_key
from shardcache.store.store import Store
from shardcache.telemetry.metrics import Counters

log = structlog.get_logger()

_GRACE_S = 1.0  # time that a reader waits for an answer before it gets the cached version
_TIMEOUT_S = 5.0  # time limit of a request


@dataclass(slots=True, eq=False, repr=False)
class Revalidation:
    """Asks origins for the present version of cached shards, once per shard for all readers.

    An answer that comes soon takes effect immediately. A slow answer is awaited in the background,
    while the cached version is served, and takes effect from the next lease on. A silent origin
    gets one request at a time, and no reader waits for its answer. An answer stays valid for
    `_ttl_s` seconds.

    A shard is identified by its name in plans, which `shard_listing.name_of` makes of its url, and
    of the version if the reader named one.

    Attributes:
        pending: the requests without an answer yet, by the shard's name. The result of each is the
            error for the readers, or None.
    """

    _store: Store
    _origins: Origins
    _planner: Planner
    _counters: Counters
    _group: asyncio.TaskGroup
    _ttl_s: float
    pending: dict[str, asyncio.Task[ShardcacheError | None]] = field(
        default_factory=dict,
        init=False,
    )
    _pending_of_origin: Counter[str] = field(default_factory=Counter, init=False)
    _silent_origins: set[str] = field(default_factory=set, init=False)
    # Locks of the signed urls that are being checked, by url.
    _signature_locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary,
        init=False,
    )

    async def check(self, name: str, ref: ShardRef) -> None:
        """Revalidate a cached shard, unless the last answer is still valid.

        Raises the origin's error, for example if the shard no longer exists.

        Args:
            name: the shard's name in plans.
            ref: the shard.
        """
        origin = store_of(ref.url)
        if not self._is_stale(name):
            return
        if origin in self._silent_origins and self._pending_of_origin[origin]:
            return  # a silent origin gets one request at a time

        # 1. There is one request for all readers of the shard.
        request = self.pending.get(name)
        if request is None:
            request = self._group.create_task(
                self._ask(name, ref),
                name=f"revalidate {ref.url}",
            )
            self.pending[name] = request
        if origin in self._silent_origins:
            return

        # 2. The answer counts now if it comes soon, and from the next lease on if it is slow.
        answered, _ = await asyncio.wait([request], timeout=_GRACE_S)
        if not answered:
            self._silent_origins.add(origin)
            return
        error = request.result()
        if error is not None:
            raise error

    def allows(self, url: str) -> bool:
        """Return whether a reader may be given cached bytes of a url.

        For a signed url, the origin must have accepted the signature lately.
        """
        return self._origins.signatures.allows(url)

    async def check_signature(self, name: str, ref: ShardRef) -> None:
        """Have the origin check a signed url before cached bytes are read.

        No-op for a url without a signature, and for a signature that it has accepted lately. Raises
        the origin's error if it refuses the signature, and OriginUnavailableError if there is no
        answer.

        Args:
            name: the shard's name in plans.
            ref: the shard.
        """
        if self.allows(ref.url):
            return
        lock = self._signature_locks.setdefault(ref.url, asyncio.Lock())
        async with lock:  # one request serves all readers of the url
            if self.allows(ref.url):
                return  # the request of another reader, which held the lock, was accepted
            asked_s = time.monotonic()
            obj = await self._stat_signed(ref.url)
        key = shard_key(place_of(ref.url, is_file=ref.is_file), obj.version)
        self._check_length(key, obj)
        # A reader that named no version gets the latest one, which the answer also states.
        if ref.version is None:
            self._learn(name, key, asked_s)

    async def fetch_present(self, url: str) -> RemoteObject | None:
        """Return the object of a cached shard or file as its origin has it now.

        Returns None if the origin fails, refuses the request or does not answer in time: the cached
        version is served then. Raises the origin's other errors, and its refusal of a signed url.
        """
        # The request is counted even if it fails, as stores charge for it.
        self._counters.count_fetched(url, size_bytes=0, requests=1)
        try:
            async with asyncio.timeout(_TIMEOUT_S) as limit:
                return await self._origins.origin(url).stat(url)
        except (OriginUnavailableError, AccessDeniedError, TimeoutError) as exn:
            if isinstance(exn, AccessDeniedError) and is_signed(url):
                raise  # the caller has no right to the cached version
            log.warning(
                "cannot revalidate the shard; serving the cached version",
                shard=url,
                cause=str(exn),
            )
            return None
        except ShardcacheError:
            raise
        except Exception:
            # A top-level guard, as for transfers: one bad shard must not end all jobs.
            log.exception("unexpected error in revalidation; serving the cached version", shard=url)
            return None
        finally:
            if limit.expired():
                self._silent_origins.add(store_of(url))
            else:
                self._silent_origins.discard(store_of(url))

    def stop(self) -> None:
        """Cancel the pending requests."""
        for request in list(self.pending.values()):
            request.cancel()

    def _check_length(self, key: str, obj: RemoteObject) -> None:
        """Raise OriginError if the cached shard of the same version has another length.

        The server then gives one version, such as an ETag, to different objects. The signature no
        longer counts as accepted, as its object is not the cached one.
        """
        shard = self._store.shards.get(key)
        if shard is None or shard.facts is None or shard.facts.origin_bytes == obj.size_bytes:
            return
        self._origins.signatures.record_refused(obj.url)
        raise OriginError(
            f"the server states {obj.size_bytes} bytes for a version of which "
            f"{shard.facts.origin_bytes} are cached, by another signature",
            url=obj.url,
            remedy="have the server change the ETag with the object; then evict the shard",
        )

    async def _stat_signed(self, url: str) -> RemoteObject:
        """Return the object of a signed url. Raises the origin's error if it refuses the url."""
        self._counters.count_fetched(url, size_bytes=0, requests=1)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._origins.origin(url).stat(url)
        except TimeoutError as exn:
            raise OriginUnavailableError(
                f"the origin has not said within {_TIMEOUT_S:g} s whether the signature is valid",
                url=url,
            ) from exn

    def _is_stale(self, name: str) -> bool:
        """Return whether a shard, or parts of it, are cached without a valid answer about them."""
        # A shard that is not cached needs no request here: its transfer asks for the version.
        key = self._planner.key(name)
        is_cached = key in self._store.shards or key in self._store.parts
        age_s = time.monotonic() - self._planner.checked_at_s(name)
        return is_cached and age_s > self._ttl_s

    async def _ask(self, name: str, ref: ShardRef) -> ShardcacheError | None:
        """Ask the origin for the present version, and record it; return the error for readers."""
        origin = store_of(ref.url)
        asked_s = time.monotonic()
        self._pending_of_origin[origin] += 1
        try:
            key = await self._present_key(name, ref)
        except ShardcacheError as exn:
            return exn
        finally:
            self._pending_of_origin[origin] -= 1
            del self.pending[name]
        self._learn(name, key, asked_s)
        return None

    def _learn(self, name: str, key: str, asked_s: float) -> None:
        """Record an origin's answer: the key of a shard's present version.

        Args:
            name: the shard's name in plans.
            key: the key in the store.
            asked_s: time at which the origin was asked, by the monotonic clock.
        """
        # If a transfer has asked after this request, its answer stays.
        if self._planner.checked_at_s(name) < asked_s:
            self._planner.learn(name, key, checked_at_s=time.monotonic())

    async def _present_key(self, name: str, ref: ShardRef) -> str:
        """Return the key of the origin's present version; without an answer, the last known one."""
        obj = await self.fetch_present(ref.url)
        if obj is None:
            return self._planner.key(name)
        return shard_key(place_of(ref.url, is_file=ref.is_file), obj.version)
