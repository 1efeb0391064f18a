"""Tier: the cluster's shared cache in front of an origin, requested first for every part.

The tier is nginx on each node (docs/cluster.md). A request to it is the request to the origin, signature included, sent
over a connection to this node's nginx. Nothing that it answers is trusted: the origin is requested where the tier
fails, and bytes that turn out damaged are fetched past its cache, which repairs it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardcache.access.urls import S3, PlaceKind, protocol_of, row_of
from shardcache.config import OriginTable
from shardcache.errors import OriginBusyError, OriginUnavailableError, ShardChangedError
from shardcache.logs import SharedLogger
from shardcache.origin.base import RemoteObject
from shardcache.transport.messages import Answer
from shardcache.transport.parts import Parts, PartSums
from shardcache.transport.workers import Flow

log = SharedLogger()

_REFRESH = {"X-Shardcache-Fresh": "1"}  # fetches a part past the tier's cache, and replaces what it has cached
_DETOUR = {"X-Shardcache-Detour": "1"}  # leads to another owner
_STATUS = ".shardcache/status"
_WATCHED_S = 60.0
_STATUS_TIMEOUT_S = 5.0
OWNER = "x-shardcache-owner"
"""Header of a question about the owner, and of the answer, with the owner's address."""
_MAX_FAILURES = 16
_PAUSE_S = 10.0
_MAX_SUSPECTS = 4096
_SLOW_S = 60.0
_BUSY = (429, 503)

QUESTION = 0.25
"""Share of the stall time-out after which an owner that sends nothing is asked whether it lives, and has to answer."""

PRESIGNED_OPTIONS = frozenset({"key", "secret", "token", "endpoint_url", "anon", "use_ssl"})
"""Keys of `storage_options` that presigned urls support; with others, the SDK has to make every request."""


def reason_to_bypass(table: OriginTable) -> str:
    """Return the reason that a table's urls bypass the tier; empty if they do not."""
    protocol = protocol_of(table.match) if table.match else S3.names[0]
    row = row_of(protocol)
    if row is S3:
        unsupported = sorted(set(table.storage_options) - PRESIGNED_OPTIONS)
        return f"storage_options has {', '.join(unsupported)}, which only the SDK supports" if unsupported else ""
    return "" if row.kind is PlaceKind.WEB else f"only S3 and web servers can have a tier, not {protocol}://"


@runtime_checkable
class Tiered(Protocol):
    """An origin that can have a tier in front of it."""

    async def ask_tier(self, route: Route, obj: RemoteObject, parts: Parts, flow: Flow | None) -> Answer | None:
        """Return the tier's answer to a request for parts, which are then in their file; see `sums_of`.

        None, and nothing requested, if this object's parts must bypass the tier; `flow` is None if no part is expected.
        Raises what `Origin.fetch` raises when the connection fails.
        """


class Breaker:
    """Circuit breaker: opens after consecutive failures, then admits a probe every `pause_s` until one succeeds.

    Two stalls in a row open it, too: with few connections, sixteen would take minutes. After M. Nygard, "Release It!",
    2007. A probe that is cancelled needs no report: the next is due `pause_s` later.
    """

    def __init__(self, max_failures: int = _MAX_FAILURES, pause_s: float = _PAUSE_S) -> None:
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._failures = 0
        self._probe_s = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {'open' if self.is_open else 'closed'} after {self._failures} failures>"

    @property
    def is_open(self) -> bool:
        """True if only probes are admitted."""
        return self._failures >= self._max_failures

    def admits(self, now_s: float) -> bool:
        """Return whether a request may be sent now; in an open breaker, it is the probe."""
        if not self.is_open:
            return True
        if now_s < self._probe_s:
            return False
        self._probe_s = now_s + self._pause_s
        return True

    def succeeded(self) -> None:
        """Close the breaker."""
        self._failures = 0

    def failed(self, now_s: float, *, stalled: bool = False) -> None:
        """Count a failure, or a stall."""
        self._failures += math.ceil(self._max_failures / 2) if stalled else 1
        if self.is_open:
            self._probe_s = max(self._probe_s, now_s + self._pause_s)


class SlowOwners:
    """Owners that are left out for a minute, each because the object store was much quicker twice within that time."""

    def __init__(self, pause_s: float = _SLOW_S) -> None:
        self._pause_s = pause_s
        self._seen_s: dict[str, float] = {}
        self._until_s: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SlowOwners {sorted(self._until_s)}>"

    def add(self, owner: str, now_s: float) -> None:
        """Record that the object store was much quicker than an owner."""
        if now_s - self._seen_s.get(owner, -math.inf) < self._pause_s:
            self._until_s[owner] = now_s + self._pause_s
            log.info("a slow owner is left out of the tier", owner=owner, for_s=self._pause_s)
        self._seen_s[owner] = now_s

    def has(self, owner: str, now_s: float) -> bool:
        """Return whether an owner is left out."""
        return now_s < self._until_s.get(owner, -math.inf)

    def any(self, now_s: float) -> bool:
        """Return whether any owner is left out."""
        return any(now_s < until_s for until_s in self._until_s.values())


@dataclass(frozen=True, slots=True)
class Route:
    """Address and headers of one request to the tier.

    Attributes:
        address: HOST:PORT to connect to.
        refreshes, detours: True for the header of that name.
        question: "name" or "alive": asks about the owner, in place of the parts; empty for the parts.
    """

    address: str
    refreshes: bool = False
    detours: bool = False
    question: str = ""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to send in addition to the origin's."""
        asked = {OWNER: self.question} if self.question else {}
        return (_REFRESH if self.refreshes else {}) | (_DETOUR if self.detours else {}) | asked


class TierState:
    """State of the tier at one address.

    Attributes:
        address: HOST:PORT of this node's nginx.
        slow_owners: owners that are left out.
    """

    def __init__(self, address: str, breaker: Breaker | None = None) -> None:
        self.address = address
        self._breaker = breaker or Breaker()
        self._published: dict[str, Any] = {}
        self._suspects: dict[tuple[str, str, int], None] = {}  # parts whose cached bytes may be damaged, oldest first
        self.slow_owners = SlowOwners()

    def __repr__(self) -> str:
        return f"<TierState {self.address} {self._breaker}>"

    def to_json(self) -> dict[str, Any]:
        """Return the state for the status page."""
        expires_s = self._published.get("certificate_expires_s")
        return {
            "address": self.address,
            "failing": self._breaker.is_open,
            "stale": bool(self._published.get("stale")),
            "certificate_expires_s": expires_s if isinstance(expires_s, float) else None,
        }

    async def watch(self) -> None:
        """Keep up with what `shardcache cluster run` publishes on this node; runs until it is cancelled."""
        import aiohttp  # 0.1 s, which processes without a tier need not spend

        limit = aiohttp.ClientTimeout(total=_STATUS_TIMEOUT_S)
        while True:
            try:
                async with aiohttp.request("GET", f"http://{self.address}/{_STATUS}", timeout=limit) as answer:
                    found = await answer.json() if answer.status == 200 else None
                    self._published = found if isinstance(found, dict) else {}
            except (aiohttp.ClientError, OSError, ValueError):
                self._published = {}
            await asyncio.sleep(_WATCHED_S)

    def route(self, obj: RemoteObject, parts: Parts) -> Route | None:
        """Return the way to request parts from the tier; None while its breaker is open."""
        if not self._breaker.admits(time.monotonic()):
            return None
        return Route(self.address, refreshes=_suspect(obj, parts.start) in self._suspects)

    def served(self, obj: RemoteObject, parts: Parts) -> None:
        """Record that the tier answered a request as expected."""
        self._suspects.pop(_suspect(obj, parts.start), None)
        if self._breaker.is_open:
            log.info("tier recovered", tier=self.address)
        self._breaker.succeeded()

    def failed(self, obj: RemoteObject, cause: str, *, stalled: bool = False) -> None:
        """Record that it did not; `stalled` if this node's nginx was silent: for a lost owner, it answers with 504."""
        was_open = self._breaker.is_open
        self._breaker.failed(time.monotonic(), stalled=stalled)
        if self._breaker.is_open and not was_open:
            log.warning("tier unavailable; fetching from the origin", tier=self.address, url=obj.url, cause=cause)

    def suspect(self, obj: RemoteObject, starts: Iterable[int]) -> None:
        """Request the parts that begin at `starts` past the tier's cache the next time: its bytes may be damaged."""
        for start in starts:
            self._suspects[_suspect(obj, start)] = None
        while len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]


def sums_of(answer: Answer, obj: RemoteObject) -> list[PartSums]:
    """Return the checksums of the parts that the tier sent.

    Raises ShardChangedError for bytes that were not requested, OriginBusyError if the object store is throttling,
    OriginUnavailableError for any other answer without bytes.
    """
    if answer.sums is not None:
        return answer.sums
    if answer.status in _BUSY and "x-shardcache-tier" in answer.headers:
        raise OriginBusyError(f"the object store answered the tier with status {answer.status}", url=obj.url)
    if answer.status < 300:
        raise ShardChangedError("the tier sent bytes that were not requested", url=obj.url)
    raise OriginUnavailableError(f"the tier answered with status {answer.status}", url=obj.url)


def _suspect(obj: RemoteObject, start: int) -> tuple[str, str, int]:
    return obj.url, obj.version, start
