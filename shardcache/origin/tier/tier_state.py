"""State of the tier as the daemon sees it, and the routes of requests to the tier.

The tier is an optional cache that the nodes of a cluster share: an nginx on each node. It caches
parts: ranges of an object's bytes. The owner of a part is the node whose nginx caches it. The
daemon sends all requests to its own node's nginx, which passes them to the owners.

`fetch.tier` asks for a route before each request to the tier, and reports the result. A route is
the address and the extra headers of one request. The breaker stops requests to the tier while the
tier fails, except for probes: single requests that find out whether it works again.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardcache.origin.breaker import Breaker
from shardcache.origin.objects import RemoteObject
from shardcache.origin.tier.slow_owners import SlowOwners
from shardcache.shared import front
from shardcache.shared.exceptions import OriginBusyError, OriginUnavailableError, ShardChangedError
from shardcache.telemetry.logs import SharedLogger
from shardcache.transport.between.messages import Answer
from shardcache.transport.between.parts import PartSums

log = SharedLogger()

OWNER_HEADER = "x-shardcache-owner"
"""Header of a question about the owner of a part. In the answer, it has the owner's address."""

QUESTION_STALL_SHARE = 0.25
"""Share of the stall time-out after which an owner that sends nothing is asked a question.

The stall time-out is the time without bytes after which a request is given up. The question is
whether the owner still serves the request; it has the same share of the time-out to answer.
"""

_STATUS_INTERVAL_S = 60.0  # time between two reads of the status that this node's nginx serves
_STATUS_TIMEOUT_S = 5.0
_MAX_SUSPECTS = 4096  # maximum number of parts that are remembered as perhaps damaged
_BUSY = (429, 503)  # statuses with which a store throttles requests
# Header that an owner's nginx adds to the store's answers. nginx's own errors do not have it.
_FROM_STORE = "x-shardcache-tier"


class Question(Enum):
    """A question that is sent to the tier in place of a request for parts."""

    # Which node is the owner of the parts?
    OWNER = "name"
    # Does the owner still serve a request for the parts?
    IS_ALIVE = "alive"
    # Which version of the object did the store last permit the tier to serve?
    VERSION = "asked"


@dataclass(frozen=True, slots=True)
class Route:
    """Address and headers of one request to the tier.

    Attributes:
        address: path of the socket to connect to.
        refreshes: True to fetch the part past the tier's cache, and replace the tier's copy.
        detours: True if nginx is to send the request to another owner than the part's first one.
        question: the question that is asked; None to request the parts.
    """

    address: str
    refreshes: bool = False
    detours: bool = False
    question: Question | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to send in addition to the origin's."""
        headers: dict[str, str] = {}
        if self.refreshes:
            headers["X-Shardcache-Fresh"] = "1"
        if self.detours:
            headers["X-Shardcache-Detour"] = "1"
        if self.question is Question.VERSION:
            headers["X-Shardcache-Version"] = self.question.value
        elif self.question is not None:
            headers[OWNER_HEADER] = self.question.value
        return headers


class TierState:
    """State of the tier at one socket.

    Args:
        address: path of the socket of this node's nginx.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.slow_owners = SlowOwners()
        self._breaker = Breaker()
        # The status that this node's nginx serves; empty if it could not be read.
        self._status: dict[str, Any] = {}
        # Parts whose copies in the tier may be damaged, by url, version and offset of the part's
        # first byte. The dictionary serves as an ordered set, with the oldest entry first.
        self._suspects: dict[tuple[str, str, int], None] = {}

    def __repr__(self) -> str:
        return f"<TierState {self.address} {self._breaker}>"

    def to_json(self) -> dict[str, Any]:
        """Return the state for the status page."""
        expires_s = self._status.get("certificate_expires_s")
        return {
            "address": self.address,
            "failing": self._breaker.is_open,
            "stale": bool(self._status.get("stale")),
            # A float, or null; anything else is not from `shardcache cluster run`.
            "certificate_expires_s": expires_s if isinstance(expires_s, float) else None,
            "owners_left_out": self.slow_owners.count_left_out(time.monotonic()),
            "store_bytes": self._count("from_store_bytes"),
            "cached_bytes": self._count("cached_bytes"),
        }

    async def watch(self) -> None:
        """Read the status that this node's nginx serves, once a minute, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_STATUS_TIMEOUT_S):
                    self._status = await self._read_status() or {}
            except (OSError, ValueError):  # a TimeoutError is an OSError
                self._status = {}
            await asyncio.sleep(_STATUS_INTERVAL_S)

    def route(self, obj: RemoteObject, start: int) -> Route | None:
        """Return the route of a request for the part at `start`.

        Returns None if the breaker does not admit a request: the tier has failed several times, and
        no probe is due. The part is then requested from the origin.
        """
        if not self._breaker.admit(time.monotonic()):
            return None
        is_suspect = (obj.url, obj.version, start) in self._suspects
        return Route(self.address, refreshes=is_suspect)

    def version_route(self) -> Route | None:
        """Return the route of the question `Question.VERSION`.

        Returns None if the breaker does not admit a request.
        """
        if not self._breaker.admit(time.monotonic()):
            return None
        return Route(self.address, question=Question.VERSION)

    def served(self, obj: RemoteObject, start: int) -> None:
        """Record that the tier answered a request as expected."""
        self._suspects.pop((obj.url, obj.version, start), None)
        if self._breaker.is_open:
            log.info("tier recovered", tier=self.address)
        self._breaker.succeeded()

    def failed(self, obj: RemoteObject, cause: str, *, stalled: bool = False) -> None:
        """Record that the tier did not answer a request as expected.

        Args:
            cause: the reason, which is logged.
            stalled: True if this node's nginx sent nothing. Fewer of these failures open the
                breaker, as nginx itself does not work: if only an owner is down, it answers with
                status 504.
        """
        was_open = self._breaker.is_open
        self._breaker.failed(time.monotonic(), stalled=stalled)
        if self._breaker.is_open and not was_open:
            log.warning(
                "tier unavailable; fetching from the origin",
                tier=self.address,
                url=obj.url,
                cause=cause,
            )

    def suspect(self, obj: RemoteObject, starts: Iterable[int]) -> None:
        """Remember that the tier's copies of the parts at `starts` may be damaged.

        The next requests for these parts go past the tier's cache.
        """
        for start in starts:
            self._suspects[obj.url, obj.version, start] = None
        while len(self._suspects) > _MAX_SUSPECTS:
            oldest = next(iter(self._suspects))
            del self._suspects[oldest]

    def _count(self, name: str) -> int:
        """Return a number of the status; 0 if the status has none by this name."""
        count = self._status.get(name)
        return count if isinstance(count, int) else 0

    async def _read_status(self) -> dict[str, Any] | None:
        """Return the status that this node's nginx serves; None if it serves none.

        Raises OSError or ValueError if it cannot be read.
        """
        reader, writer = await asyncio.open_unix_connection(self.address)
        try:
            front.check_listener(writer.get_extra_info("socket"))
            writer.write(front.page_request(front.STATUS))
            return front.page_of(await reader.read())
        finally:
            writer.close()


def sums_of(answer: Answer, obj: RemoteObject) -> list[PartSums]:
    """Return the checksums of the parts that the tier sent.

    Raises ShardChangedError for bytes that were not requested, OriginBusyError if the object store
    is throttling, and OriginUnavailableError for any other answer without bytes.
    """
    if answer.sums is not None:
        return answer.sums
    if answer.status in _BUSY and _FROM_STORE in answer.headers:
        raise OriginBusyError(
            f"the object store answered the tier with status {answer.status}",
            url=obj.url,
        )
    if answer.status < 300:
        # There would be checksums if the answer had the requested range of the object.
        raise ShardChangedError("the tier sent bytes that were not requested", url=obj.url)
    raise OriginUnavailableError(f"the tier answered with status {answer.status}", url=obj.url)
