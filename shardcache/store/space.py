"""Pure accounting of the cache's bytes: what is taken, what is promised, what may still be given.

Space is promised before a byte is fetched, as bazel-remote's disk cache does, so that published, arriving and
quarantined files together never pass the capacity.
"""

from __future__ import annotations

from dataclasses import dataclass

# Without so much, not even the state of the cache can be written down.
_LEAST_FREE_BYTES = 64 * 1024


def footprint_bytes(size_bytes: int) -> int:
    """Return what to promise for a shard of a known size: its sidecar and journal come on top, their sizes later."""
    return size_bytes + size_bytes // 32 + 64 * 1024


@dataclass(slots=True)
class Space:
    """Bytes under the cache's own limits.

    Attributes:
        capacity_bytes: most that the cache may hold.
        min_free_bytes: what the filesystem must keep free.
        kept_bytes: published shards with their sidecars, idle partials and quarantine.
        promised_bytes: open reservations, whether already on disk or not.
        unwritten_bytes: the part of `promised_bytes` that the filesystem does not count as used yet.
        pinned_bytes: the part of `kept_bytes` that stays until it is unpinned.
    """

    capacity_bytes: int
    min_free_bytes: int = 0
    kept_bytes: int = 0
    promised_bytes: int = 0
    unwritten_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def unpinned_bytes(self) -> int:
        """The part of the capacity that readers' shards may come and go in."""
        return max(0, self.capacity_bytes - self.pinned_bytes)

    @property
    def used_bytes(self) -> int:
        """Everything that counts against the capacity."""
        return self.kept_bytes + self.promised_bytes

    def shortfall_bytes(self, wanted_bytes: int, disk_free_bytes: int) -> int:
        """Return how much must go before `wanted_bytes` may be promised; 0 when they may now."""
        over_capacity = self.used_bytes + wanted_bytes - self.capacity_bytes
        spare_bytes = disk_free_bytes - self.unwritten_bytes - self.min_free_bytes
        return max(0, over_capacity, wanted_bytes - spare_bytes)

    def crowding_bytes(self, disk_free_bytes: int) -> int:
        """Return how much must go for the filesystem to keep free what it must, and a little to work with."""
        return max(0, self.min_free_bytes + self.unwritten_bytes + _LEAST_FREE_BYTES - disk_free_bytes)

    def reserve(self) -> Reservation:
        """Open an empty reservation."""
        return Reservation(self)


@dataclass(slots=True)
class Reservation:
    """One transfer's share of the promised bytes; `close` ends it exactly once."""

    space: Space
    size_bytes: int = 0
    unwritten_bytes: int = 0

    def grow(self, size_bytes: int) -> None:
        """Promise more; the caller made sure that the space's shortfall for it is 0."""
        self.size_bytes += size_bytes
        self.unwritten_bytes += size_bytes
        self.space.promised_bytes += size_bytes
        self.space.unwritten_bytes += size_bytes

    def adopt(self, kept_bytes: int) -> None:
        """Take over bytes which lie on disk already, such as an idle partial's."""
        self.space.kept_bytes -= kept_bytes
        self.space.promised_bytes += kept_bytes
        self.size_bytes += kept_bytes

    def written(self, size_bytes: int) -> None:
        """Note that promised bytes now lie on disk."""
        self.unwritten_bytes -= size_bytes
        self.space.unwritten_bytes -= size_bytes

    def close(self, kept_bytes: int = 0) -> None:
        """Give everything back but `kept_bytes`, which stay on disk and count as kept."""
        self.space.promised_bytes -= self.size_bytes
        self.space.unwritten_bytes -= self.unwritten_bytes
        self.space.kept_bytes += kept_bytes
        self.size_bytes = self.unwritten_bytes = 0
