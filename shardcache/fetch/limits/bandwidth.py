"""Limit on the node's bandwidth: byte credit that each read gets before its bytes.

The daemon has one `Bandwidth`. Each read waits for a grant of byte credit before it takes more
bytes from the network. Grants go to the reads by priority, as connection slots do.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardcache.fetch.limits.origin_states import Limit
from shardcache.fetch.limits.slot_claims import Claim, RoundRobin
from shardcache.shared.units import size

# A grant is at most the number of bytes that the rate allows in a fiftieth of a second.
_GRANTS_PER_S = 50
# Maximum unused credit that is kept, as a number of grants.
_BURST_GRANTS = 5


def _new_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class _CreditRequest:
    """A read that waits for byte credit.

    Attributes:
        claim: the claim of the read's request, for its priority.
        size_bytes: size of the grant.
        granted: done once the grant was made.
    """

    claim: Claim
    size_bytes: float
    granted: asyncio.Future[None] = field(default_factory=_new_future)


class Bandwidth:
    """Grants byte credit before each read, at most a fiftieth of a second's worth at a time.

    The recipient of a grant is chosen only when the rate allows the grant: it is the read that is
    most urgent at that time. The most urgent reads are those that a waiting reader needs. As long
    as there are such reads in the queue, each grant goes to one of them, and so they get the whole
    rate. Clients of equal urgency take turns, and parts of one shard arrive one after the other. A
    read that gets more bytes at once than it has credit for may exceed its credit; later grants are
    delayed to make up for that.

    Args:
        bytes_per_s: the rate; None for no limit.
    """

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._grant_bytes = max(1, (bytes_per_s or 0) // _GRANTS_PER_S)
        self._burst_bytes = _BURST_GRANTS * self._grant_bytes
        # Credit that can be granted now; negative after reads that have exceeded their credit.
        self._unused_bytes: float = self._burst_bytes
        # Time of the last call of `_earn`; infinite before the first call, which earns nothing.
        self._counted_s = math.inf
        self._queue: list[_CreditRequest] = []
        # Calls `_make_grants` when the next grant is possible; None if no read waits.
        self._timer: asyncio.TimerHandle | None = None
        self._round_robin = RoundRobin()

    def limits(self) -> Iterator[Limit]:
        """Yield the bandwidth limit, if there is one."""
        if self._bytes_per_s is not None:
            text = f"--max-bandwidth {size(self._bytes_per_s)}/s"
            yield Limit("bandwidth", text, holds=self._timer is not None)

    async def grant(self, claim: Claim, wanted_bytes: float) -> float:
        """Wait for byte credit and return it.

        The credit is at most `wanted_bytes`; without a bandwidth limit, it is infinite.

        Args:
            claim: the claim of the read's request, for its priority.
            wanted_bytes: number of bytes that the read has still to take.
        """
        if self._bytes_per_s is None:
            return math.inf
        request = _CreditRequest(claim, min(wanted_bytes, self._grant_bytes))
        self._queue.append(request)
        if self._timer is None:
            self._make_grants()
        try:
            await request.granted
        except asyncio.CancelledError:
            if request in self._queue:
                self._queue.remove(request)
            else:
                # The grant was made at the same moment, so its credit is taken back.
                self.settle(request.size_bytes)
            raise
        return request.size_bytes

    def settle(self, unused_bytes: float) -> None:
        """Take back the byte credit that a finished read has left.

        Args:
            unused_bytes: the unused credit; negative if the read has exceeded its credit.
        """
        if self._bytes_per_s is not None:
            self._unused_bytes += unused_bytes

    def _make_grants(self) -> None:
        """Make the grants that the rate allows now, and set the timer for the next grant."""
        assert self._bytes_per_s is not None  # no read waits if there is no limit
        loop = asyncio.get_running_loop()
        self._timer = None
        self._earn(self._bytes_per_s, loop.time())

        while self._queue:
            request = min(self._queue, key=self._rank)
            lacking_bytes = request.size_bytes - self._unused_bytes
            if lacking_bytes >= 1:  # a fraction of a byte is a rounding error
                wait_s = lacking_bytes / self._bytes_per_s
                self._timer = loop.call_later(wait_s, self._make_grants)
                return

            self._unused_bytes -= request.size_bytes
            self._queue.remove(request)
            self._round_robin.serve(request.claim.ask_priority().client)
            # A read that was cancelled a moment ago may still be in the queue. `grant` then gives
            # this credit back, when the cancelled task runs.
            if not request.granted.cancelled():
                request.granted.set_result(None)

    def _earn(self, bytes_per_s: int, present_s: float) -> None:
        """Add the credit that the time since the last call is worth.

        Unused credit grows to `_burst_bytes` at most.
        """
        earned_bytes = bytes_per_s * max(0.0, present_s - self._counted_s)
        self._counted_s = present_s
        filled_bytes = min(self._burst_bytes, self._unused_bytes + earned_bytes)
        # Credit that reads have given back may exceed this maximum, and is not taken away.
        self._unused_bytes = max(self._unused_bytes, filled_bytes)

    def _rank(self, request: _CreditRequest) -> tuple[int, int, float, int]:
        """Return a sort key by which the request to serve first is the smallest.

        Requests are served by class, then by the client's last turn, deadline and arrival.
        """
        claim = request.claim
        priority = claim.ask_priority()
        last_turn = self._round_robin.last(priority.client)
        return priority.priority_class, last_turn, priority.deadline_s, claim.arrival
