"""Accounting of the cache's bytes: kept, reserved and still available."""

import sys
from dataclasses import dataclass

from shardcache.shared.units import size

_RESERVE_BYTES = 64 * 1024  # with less free space, not even the cache's own state can be written

# Estimates for a shard's sidecar and journal.
_INDEX_SHARE = 32  # one byte for each 32 of the shard
_MIN_INDEX_BYTES = 64 * 1024


def footprint_bytes(size_bytes: int) -> int:
    """Return the bytes to reserve for a shard, with an estimate for its sidecar and journal."""
    return size_bytes + size_bytes // _INDEX_SHARE + _MIN_INDEX_BYTES


def typical_sidecar_bytes(samples: int) -> int:
    """Return the size of a shard's sidecar, if each sample has two members and a short key."""
    header_bytes = 640
    key_bytes = 12
    members = 2
    # Of the index: 16 bytes for a sample, and 20 for each of its members.
    sample_bytes = key_bytes + 16 + 20 * members
    return header_bytes + samples * sample_bytes


@dataclass(slots=True)
class Space:
    """The cache's bytes under its own limits: kept, reserved and still available.

    Space is reserved before a byte is fetched, as in bazel-remote's disk cache, so that published,
    arriving and quarantined files together never exceed the capacity.

    Attributes:
        capacity_bytes: maximum of `used_bytes`.
        min_free_bytes: free space that the filesystem must keep.
        kept_bytes: published shards with their sidecars, idle partials and quarantine.
        reserved_bytes: open reservations, whether already on disk or not.
        unwritten_bytes: the part of `reserved_bytes` that is not on disk yet.
        pinned_bytes: the part of `kept_bytes` that is pinned.
        disk_limit_bytes: the space that other files left to the cache when it was last measured.
    """

    capacity_bytes: int
    min_free_bytes: int = 0
    kept_bytes: int = 0
    reserved_bytes: int = 0
    unwritten_bytes: int = 0
    pinned_bytes: int = 0
    disk_limit_bytes: int = sys.maxsize

    @property
    def used_bytes(self) -> int:
        """All bytes that count against the capacity."""
        return self.kept_bytes + self.reserved_bytes

    def measure(self, disk_free_bytes: int) -> None:
        """Update `disk_limit_bytes`: the cache's own files do not change it, only others do."""
        on_disk_bytes = self.used_bytes - self.unwritten_bytes
        self.disk_limit_bytes = on_disk_bytes + disk_free_bytes - self.min_free_bytes

    def effective_bytes(self, allocating_bytes: int = 0) -> int:
        """Return the capacity, or less if other files leave less to the cache.

        Args:
            allocating_bytes: unwritten bytes that may have been allocated, hence not free, when the
                disk was measured.
        """
        limit_bytes = min(self.capacity_bytes, self.disk_limit_bytes + allocating_bytes)
        return max(0, limit_bytes)

    @property
    def explanation(self) -> str:
        """The effective capacity in words, with its cause."""
        if self.effective_bytes() < self.capacity_bytes:
            return f"other files on the disk limit the cache to {size(self.effective_bytes())}"
        return f"the cache's capacity is {size(self.capacity_bytes)}"

    @property
    def remedy(self) -> str:
        """Advice for those to whom the effective capacity is too small."""
        if self.effective_bytes() < self.capacity_bytes:
            return "remove other files from the cache's disk, or lower --min-free"
        return "raise --capacity"

    def shortfall_bytes(self, wanted_bytes: int) -> int:
        """Return how many bytes to evict before `wanted_bytes` can be reserved; 0 if none."""
        # Not `effective_bytes`: the limit may be negative, and then all the more has to go.
        limit_bytes = min(self.capacity_bytes, self.disk_limit_bytes)
        return max(0, self.used_bytes + wanted_bytes - limit_bytes)

    @property
    def crowding_bytes(self) -> int:
        """Bytes to evict until `min_free_bytes` and a small reserve of the filesystem are free."""
        return max(0, self.used_bytes + _RESERVE_BYTES - self.disk_limit_bytes)


@dataclass(slots=True)
class Reservation:
    """One transfer's share of the reserved bytes; ended by exactly one call of `close`.

    Attributes:
        space: the accounting that it belongs to.
        size_bytes: bytes reserved.
        unwritten_bytes: those of them that are not on disk yet.
        adopted_bytes: those of them that were on disk before: an idle partial's.
    """

    space: Space
    size_bytes: int = 0
    unwritten_bytes: int = 0
    adopted_bytes: int = 0

    def grow(self, size_bytes: int) -> None:
        """Reserve more bytes; the caller has checked that the shortfall for them is 0."""
        self.size_bytes += size_bytes
        self.unwritten_bytes += size_bytes
        self.space.reserved_bytes += size_bytes
        self.space.unwritten_bytes += size_bytes

    def adopt(self, kept_bytes: int) -> None:
        """Take over bytes that are already on disk, such as those of an idle partial."""
        self.space.kept_bytes -= kept_bytes
        self.space.reserved_bytes += kept_bytes
        self.size_bytes += kept_bytes
        self.adopted_bytes += kept_bytes

    def disown(self) -> None:
        """Give up all adopted bytes, which are counted elsewhere from now on."""
        self.space.reserved_bytes -= self.adopted_bytes
        self.size_bytes -= self.adopted_bytes
        self.adopted_bytes = 0

    def written(self, size_bytes: int) -> None:
        """Record that reserved bytes are now on disk."""
        self.unwritten_bytes -= size_bytes
        self.space.unwritten_bytes -= size_bytes

    def keep(self, size_bytes: int) -> None:
        """Count reserved bytes, which are on disk now, as kept."""
        self.size_bytes -= size_bytes
        self.unwritten_bytes -= size_bytes
        self.space.reserved_bytes -= size_bytes
        self.space.unwritten_bytes -= size_bytes
        self.space.kept_bytes += size_bytes

    def close(self, kept_bytes: int = 0) -> None:
        """Release the reservation, except `kept_bytes`, which stay on disk and count as kept."""
        self.space.reserved_bytes -= self.size_bytes
        self.space.unwritten_bytes -= self.unwritten_bytes
        self.space.kept_bytes += kept_bytes
        self.size_bytes = 0
        self.unwritten_bytes = 0
        self.adopted_bytes = 0
