"""The end of connections whose clients read nothing of what they are sent."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class StallTimer:
    """Aborts a connection once its client has read nothing for too long.

    It runs while bytes wait to be sent: to be told of the first one, it sets the transport's limit
    to zero.
    """

    _transport: asyncio.WriteTransport
    _limit_s: float
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._transport.set_write_buffer_limits(high=0)

    def start(self) -> None:
        """Start, as the client does not read as fast as it is sent."""
        waiting_bytes = self._transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limit_s, self._check, waiting_bytes)

    def stop(self) -> None:
        """Stop, as the client has read everything, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, waited_bytes: int) -> None:
        """Abort the connection unless fewer bytes wait than did."""
        if self._transport.get_write_buffer_size() < waited_bytes:
            self.start()
        else:
            self._transport.abort()
