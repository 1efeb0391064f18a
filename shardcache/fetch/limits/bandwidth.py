"""Limit on the node's bandwidth: byte credit that each read gets before its bytes."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardcache.fetch.limits.origin_states import Limit
from shardcache.fetch.limits.slot_claims import Claim, RoundRobin
from shardcache.shared.units import size

# A grant is of the bytes of a fiftieth of a second at most.
_GRANTS_PER_S = 50
# Unused credit is kept up to this many grants.
_BURST_GRANTS = 5


def _new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _CreditRequest:
    """A read that waits for byte credit."""

    claim: Claim
    size_bytes: float
    granted: asyncio.Future[None] = field(default_factory=_new_future)


class Bandwidth:
    """Grants byte credit before each read, at most a fiftieth of a second's worth at a time.

    A grant's recipient is chosen no sooner than the rate allows the grant, so that waiting readers
    get the whole rate for as long as they use it. Clients of equal urgency take turns, and parts of
    one shard arrive one after the other. A read that cannot be cut to size may exceed its credit;
    later grants make up for it.

    Args:
        bytes_per_s: the rate; None for no limit.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._grant_bytes = max(1, (bytes_per_s or 0) // _GRANTS_PER_S)
        self._burst_bytes = _BURST_GRANTS * self._grant_bytes
        self._unused_bytes: float = self._burst_bytes  # negative after reads without credit
        self._counted_s = math.inf  # time of the last `_earn`; the first earns nothing
        self._queue: list[_CreditRequest] = []
        self._timer: asyncio.TimerHandle | None = None
        self._round_robin = RoundRobin()

    def limits(self) -> Iterator[Limit]:
        """Yield the limit, if there is one."""
        if self._bytes_per_s is not None:
            text = f"--max-bandwidth {size(self._bytes_per_s)}/s"
            yield Limit("bandwidth", text, holds=self._timer is not None)

    async def grant(self, claim: Claim, wanted_bytes: float) -> float:
        """Wait for byte credit and return it: at most `wanted_bytes`; infinite without a limit."""
        if self._bytes_per_s is None:
            return math.inf
        request = _CreditRequest(claim, min(wanted_bytes, self._grant_bytes))
        self._queue.append(request)
        if self._timer is None:
            self._hand_out(self._bytes_per_s)
        try:
            await request.granted
        except asyncio.CancelledError:
            if request in self._queue:
                self._queue.remove(request)
            else:  # it was granted at the same moment
                self.settle(request.size_bytes)
            raise
        return request.size_bytes

    def settle(self, unused_bytes: float) -> None:
        """Take back unused byte credit; negative for bytes read without credit."""
        if self._bytes_per_s is not None:
            self._unused_bytes += unused_bytes

    def _hand_out(self, bytes_per_s: int) -> None:
        """Grant what the rate allows now, and set the timer for the next request."""
        loop = asyncio.get_running_loop()
        self._timer = None
        self._earn(bytes_per_s, loop.time())

        while self._queue:
            request = min(self._queue, key=self._rank)
            lacking_bytes = request.size_bytes - self._unused_bytes
            if lacking_bytes >= 1:  # fractions are rounding errors
                wait_s = lacking_bytes / bytes_per_s
                self._timer = loop.call_later(wait_s, self._hand_out, bytes_per_s)
                return

            self._unused_bytes -= request.size_bytes
            self._queue.remove(request)
            self._round_robin.serve(request.claim.ask_priority().client)
            if not request.granted.cancelled():
                request.granted.set_result(None)

    def _earn(self, bytes_per_s: int, present_s: float) -> None:
        """Add what the time since the last call is worth, up to a burst."""
        earned_bytes = bytes_per_s * max(0.0, present_s - self._counted_s)
        self._counted_s = present_s
        filled_bytes = min(self._burst_bytes, self._unused_bytes + earned_bytes)
        # Credit that was given back may exceed a burst, and stays.
        self._unused_bytes = max(self._unused_bytes, filled_bytes)

    def _rank(self, request: _CreditRequest) -> tuple[int, int, float, int]:
        """Return the order of requests: by class, by the client's last turn, deadline, arrival."""
        claim = request.claim
        priority = claim.ask_priority()
        last_turn = self._round_robin.last(priority.client)
        return priority.klass, last_turn, priority.deadline_s, claim.arrival
