"""Limit of the memory that the plans of all readers take.

A plan is a list of shards (`Listing`), which plans can share, and an order: for each position, the
number of a shard in the list. `Reader` counts its plan here as it declares, extends and drops the
plan.

A reader of ranges may also announce the ranges that it reads next. This is only advice, so it never
takes the memory of a plan: all announced ranges together have a limit of their own.
"""

from collections import Counter

from shardcache.cache.listings.shard_listing import Listing
from shardcache.shared.exceptions import CapacityError
from shardcache.shared.units import size

_POSITION_BYTES = 64  # memory taken by each position of a plan
# Memory taken by each name of an announced range: that of its object, and of each of its parts.
_NAME_BYTES = 400
# Announced ranges may take this share of the limit, in addition to the plans.
_ANNOUNCED_SHARE = 1 / 4


class PlanMemory:
    """Memory of all plans. A list of shards that several plans share counts once.

    The sums are kept up to date as plans begin and end, and never added up again: a process may
    have thousands of plans, one for each file that it has open.

    Args:
        limit_bytes: limit of all plans together. A single plan may take half of this.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._positions = 0  # of all plans
        self._announced_names = 0  # of all announced ranges
        # By list of shards, the number of plans that use this list.
        self._plans: Counter[Listing] = Counter()
        self._listings_bytes = 0

    def check(self, positions: int, listing: Listing, added: int) -> None:
        """Raise CapacityError if a plan takes too much memory, alone or with all others.

        Args:
            positions: the number of positions that the plan has.
            listing: the plan's list of shards.
            added: the number of positions to be added to the plan.
        """
        own_bytes = _POSITION_BYTES * (positions + added) + listing.memory_bytes
        _check_limit("the plan takes", own_bytes, self._limit_bytes // 2)

        listings_bytes = self._listings_bytes
        if listing not in self._plans:
            listings_bytes += listing.memory_bytes
        all_bytes = _POSITION_BYTES * (self._positions + added) + listings_bytes
        _check_limit("all plans together take", all_bytes, self._limit_bytes)

    def begin(self, listing: Listing) -> None:
        """Count a new plan, which has no positions yet. Raises as `check` does."""
        self.check(positions=0, listing=listing, added=0)  # only the list of shards counts
        if listing not in self._plans:
            self._listings_bytes += listing.memory_bytes
        self._plans[listing] += 1

    def extend(self, positions: int) -> None:
        """Count a number of positions that were added to a plan."""
        self._positions += positions

    def may_announce(self, names: int) -> bool:
        """Return whether ranges with this number of names may be announced besides all others."""
        bytes_with = _NAME_BYTES * (self._announced_names + names)
        return bytes_with <= self._limit_bytes * _ANNOUNCED_SHARE

    def announce(self, names: int) -> None:
        """Count the names of ranges that were announced; a negative number of those dropped."""
        self._announced_names += names

    def end(self, listing: Listing, positions: int) -> None:
        """Stop counting a plan and the number of its positions."""
        self._positions -= positions
        self._plans[listing] -= 1
        if not self._plans[listing]:
            del self._plans[listing]
            self._listings_bytes -= listing.memory_bytes


def _check_limit(subject: str, taken_bytes: int, limit_bytes: int) -> None:
    """Raise CapacityError if memory is over its limit.

    Args:
        subject: beginning of the message, such as "the plan takes".
        taken_bytes: the memory taken.
        limit_bytes: the limit.
    """
    if taken_bytes > limit_bytes:
        limit = size(limit_bytes)
        raise CapacityError(
            f"{subject} {size(taken_bytes)} of the daemon's memory; the limit is {limit}",
            remedy="start the daemon with more --plan-memory, or write fewer and larger shards",
        )
