"""Owners of the tier's parts that are left out for a while.

The owner of a part is the node whose nginx caches the part for the cluster. An owner that is slower
than the object store would hold up the whole cluster, so it is left out, and the next owner serves
its parts. The table was measured with three nodes, one of which has a link of 1 Mbit/s and is the
slow owner. The column "time" is the time in which the two other nodes fetch a dataset. The column
"copies" is the number of bytes that the object store sends, divided by the size of the dataset.

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

_PAUSE_S = 60.0  # default time for which an owner is left out


class SlowOwners:
    """Owners that are left out because they are slow.

    An owner is left out once it was slower than the object store twice within `pause_s`.

    Args:
        pause_s: the time for which an owner is left out.
    """

    def __init__(self, pause_s: float = _PAUSE_S) -> None:
        self._pause_s = pause_s
        # All times are by the monotonic clock.
        # By owner, the last time at which the owner was slower than the store.
        self._slow_at_s: dict[str, float] = {}
        # By owner, the time until which the owner is left out.
        self._left_out_until_s: dict[str, float] = {}

    def record(self, owner: str, now_s: float) -> None:
        """Record that an owner was slower than the object store.

        The first record only counts. A second record within the pause leaves the owner out.

        Args:
            owner: address of the owner.
            now_s: the present time by the monotonic clock.
        """
        since_last_s = now_s - self._slow_at_s.get(owner, -math.inf)
        if since_last_s < self._pause_s:
            self._left_out_until_s[owner] = now_s + self._pause_s
            log.info("tier owner is slow; skipping it", owner=owner, for_s=self._pause_s)
        self._slow_at_s[owner] = now_s

    def is_left_out(self, owner: str, now_s: float) -> bool:
        """Return whether an owner is left out."""
        return now_s < self._left_out_until_s.get(owner, -math.inf)

    def is_any_left_out(self, now_s: float) -> bool:
        """Return whether any owner is left out."""
        return self.count_left_out(now_s) > 0

    def count_left_out(self, now_s: float) -> int:
        """Return the number of owners that are left out."""
        return sum(now_s < until_s for until_s in self._left_out_until_s.values())
