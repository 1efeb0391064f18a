"""Accounting of the cache's bytes: kept, reserved and still available.

Kept bytes are those of files that stay in the cache until they are evicted: published shards, idle
partials (interrupted downloads that no transfer is using) and quarantined shards. Reserved bytes
belong to transfers: each transfer has a `Reservation`, which it makes before it fetches a byte. The
store has one `Space`; the evictor asks it how much has to be removed.
"""

import sys
from dataclasses import dataclass

from shardcache.shared.units import size

_SPARE_BYTES = 64 * 1024  # with less free space, not even the cache's own state can be written

# Estimate for the sidecar and journal of a shard: one byte for each 32 bytes of the shard, and what
# even an empty shard takes.
_SHARD_BYTES_PER_INDEX_BYTE = 32
_MIN_INDEX_BYTES = 64 * 1024


def footprint_bytes(size_bytes: int) -> int:
    """Return the bytes to reserve for a shard, with an estimate for its sidecar and journal."""
    index_bytes = size_bytes // _SHARD_BYTES_PER_INDEX_BYTE + _MIN_INDEX_BYTES
    return size_bytes + index_bytes


def typical_sidecar_bytes(samples: int) -> int:
    """Return the size of a shard's sidecar, if each sample has two members and a short key."""
    header_bytes = 640
    key_bytes = 12
    members = 2
    # The index has 16 bytes for each sample, and 20 for each of its members.
    sample_bytes = key_bytes + 16 + 20 * members
    return header_bytes + samples * sample_bytes


@dataclass(slots=True)
class Space:
    """The cache's bytes and their limits.

    Space is reserved before a byte is fetched, as in bazel-remote's disk cache, so that published,
    arriving and quarantined files together never exceed the capacity.

    Attributes:
        capacity_bytes: maximum of `used_bytes`.
        min_free_bytes: space that must stay free on the filesystem.
        kept_bytes: bytes of published shards with their sidecars, of idle partials and of
            quarantined shards.
        reserved_bytes: bytes of all open reservations, whether they are on disk yet or not.
        unwritten_bytes: the part of `reserved_bytes` that is not on disk yet.
        pinned_bytes: the part of `kept_bytes` that belongs to pinned shards.
        disk_limit_bytes: space that other files on the disk left to the cache when the disk was
            last measured. It may be negative.
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
        """Update `disk_limit_bytes` from the free space of the filesystem.

        The cache's own files on disk are added to the free space, so that only other files change
        the limit.
        """
        on_disk_bytes = self.used_bytes - self.unwritten_bytes
        self.disk_limit_bytes = on_disk_bytes + disk_free_bytes - self.min_free_bytes

    def effective_bytes(self, allocating_bytes: int = 0) -> int:
        """Return the capacity, or less if other files leave less to the cache.

        Args:
            allocating_bytes: unwritten bytes whose space may already have been allocated when the
                disk was measured. `measure` then took them for bytes of other files.
        """
        limit_bytes = min(self.capacity_bytes, self.disk_limit_bytes + allocating_bytes)
        return max(0, limit_bytes)

    @property
    def possible_bytes(self) -> int:
        """The effective capacity, if all unwritten bytes were allocated when it was measured."""
        return self.effective_bytes(allocating_bytes=self.unwritten_bytes)

    @property
    def unpinned_bytes(self) -> int:
        """The part of `possible_bytes` without pinned shards; negative if these take more."""
        return self.possible_bytes - self.pinned_bytes

    @property
    def explanation(self) -> str:
        """The effective capacity and its cause, in words for an error message."""
        if self._is_limited_by_disk:
            return f"other files on the disk limit the cache to {size(self.effective_bytes())}"
        return f"the cache's capacity is {size(self.capacity_bytes)}"

    @property
    def remedy(self) -> str:
        """Advice for users whose data exceeds the effective capacity."""
        if self._is_limited_by_disk:
            return "remove other files from the cache's disk, or lower --min-free"
        return "raise --capacity"

    @property
    def _is_limited_by_disk(self) -> bool:
        return self.effective_bytes() < self.capacity_bytes

    def shortfall_bytes(self, wanted_bytes: int) -> int:
        """Return how many bytes to evict before `wanted_bytes` can be reserved; 0 if none."""
        # Unlike `effective_bytes`, the limit may be negative: then even more has to be evicted.
        limit_bytes = min(self.capacity_bytes, self.disk_limit_bytes)
        return max(0, self.used_bytes + wanted_bytes - limit_bytes)

    @property
    def crowding_bytes(self) -> int:
        """Bytes to evict until the filesystem has `min_free_bytes` and a little more free."""
        return max(0, self.used_bytes + _SPARE_BYTES - self.disk_limit_bytes)


@dataclass(slots=True)
class Reservation:
    """The bytes that one transfer has reserved; ended by exactly one call of `close`.

    Attributes:
        space: the accounting that the reservation belongs to.
        size_bytes: number of bytes reserved.
        unwritten_bytes: the part of `size_bytes` that is not on disk yet.
        adopted_bytes: the part of `size_bytes` that was on disk before the transfer began, as an
            idle partial that the transfer resumes.
    """

    space: Space
    size_bytes: int = 0
    unwritten_bytes: int = 0
    adopted_bytes: int = 0

    def grow(self, size_bytes: int) -> None:
        """Reserve more bytes. The caller has checked that the shortfall for them is 0."""
        self.size_bytes += size_bytes
        self.unwritten_bytes += size_bytes
        self.space.reserved_bytes += size_bytes
        self.space.unwritten_bytes += size_bytes

    def adopt(self, kept_bytes: int) -> None:
        """Turn kept bytes of an idle partial, which are on disk, into reserved bytes."""
        self.space.kept_bytes -= kept_bytes
        self.space.reserved_bytes += kept_bytes
        self.size_bytes += kept_bytes
        self.adopted_bytes += kept_bytes

    def disown(self) -> None:
        """Give up all adopted bytes, which the caller counts as kept bytes from now on."""
        self.space.reserved_bytes -= self.adopted_bytes
        self.size_bytes -= self.adopted_bytes
        self.adopted_bytes = 0

    def mark_written(self, size_bytes: int) -> None:
        """Record that reserved bytes are now on disk."""
        self.unwritten_bytes -= size_bytes
        self.space.unwritten_bytes -= size_bytes

    def keep(self, size_bytes: int) -> None:
        """Turn unwritten bytes of the reservation, which are on disk now, into kept bytes."""
        self.size_bytes -= size_bytes
        self.unwritten_bytes -= size_bytes
        self.space.reserved_bytes -= size_bytes
        self.space.unwritten_bytes -= size_bytes
        self.space.kept_bytes += size_bytes

    def close(self, kept_bytes: int = 0) -> None:
        """End the reservation.

        Args:
            kept_bytes: number of bytes that stay on disk, and count as kept from now on.
        """
        self.space.reserved_bytes -= self.size_bytes
        self.space.unwritten_bytes -= self.unwritten_bytes
        self.space.kept_bytes += kept_bytes
        self.size_bytes = 0
        self.unwritten_bytes = 0
        self.adopted_bytes = 0
