"""Owners of the tier's parts that are left out for a while.

Measured with three nodes, one of which has a link of 1 Mbit/s: the time in which the two others
fetch a dataset, and the number of copies that the store sends.

=================================================  =====  ======
the slow owner                                      time  copies
=================================================  =====  ======
is left out; the next owner sends its parts         15 s  1.3
is left out; the store sends its parts              16 s  1.55
is not left out                                     75 s  1.5
does not exist                                       5 s
=================================================  =====  ======
"""

import math

from shardcache.telemetry.logs import SharedLogger

log = SharedLogger()

_SLOW_S = 60.0


class SlowOwners:
    """Owners that are left out for a minute.

    Each was slower than the object store twice within that time.

    Args:
        pause_s: the time for which they are left out.
    """

    def __init__(self, pause_s: float = _SLOW_S) -> None:
        self._pause_s = pause_s
        self._seen_s: dict[str, float] = {}  # by owner: when it was last slower than the store
        self._until_s: dict[str, float] = {}  # by owner: until when it is left out

    def add(self, owner: str, now_s: float) -> None:
        """Record that an owner was slower than the object store."""
        since_last_s = now_s - self._seen_s.get(owner, -math.inf)
        if since_last_s < self._pause_s:
            self._until_s[owner] = now_s + self._pause_s
            log.info("tier owner is slow; skipping it", owner=owner, for_s=self._pause_s)
        self._seen_s[owner] = now_s

    def has(self, owner: str, now_s: float) -> bool:
        """Return whether an owner is left out."""
        return now_s < self._until_s.get(owner, -math.inf)

    def any(self, now_s: float) -> bool:
        """Return whether any owner is left out."""
        return self.left_out(now_s) > 0

    def left_out(self, now_s: float) -> int:
        """Return the number of owners that are left out."""
        return sum(now_s < until_s for until_s in self._until_s.values())
