"""Disconnection of clients that stop reading.

`acceptor` has a `StallTimer` for each connection of a socket with such a limit.
"""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class StallTimer:
    """Aborts a connection once its client has read nothing for too long.

    The timer runs while bytes wait in the transport's buffer. The buffer's limit is set to zero, so
    that asyncio calls `pause_writing`, which starts the timer, as soon as the first byte waits.
    """

    _transport: asyncio.WriteTransport
    _limit_s: float
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._transport.set_write_buffer_limits(high=0)

    def start(self) -> None:
        """Start the timer: there are bytes that the client has not read."""
        waiting_bytes = self._transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limit_s, self._check, waiting_bytes)

    def stop(self) -> None:
        """Stop the timer: the client has read everything, or has disconnected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, bytes_at_start: int) -> None:
        """Abort the connection, unless fewer bytes wait now than at the timer's start.

        In that case the client has read something, and the timer starts again.
        """
        if self._transport.get_write_buffer_size() < bytes_at_start:
            self.start()
        else:
            self._transport.abort()
