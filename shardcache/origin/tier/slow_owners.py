"""Owners of the tier's parts that are left out for a while.

Of three nodes of which one has a link of 1 Mbit/s, the two others fetch a dataset in 15 s and with
1.3 copies from the store; without that node in 5 s. If it is not left out, they take 75 s and 1.5
copies. If its parts are then requested from the store, not by a detour from the next owner, they
take 16 s and 1.55 copies.
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
