"""Limit of the memory that the plans of all readers take."""

from array import array
from collections.abc import Collection
from typing import Protocol

from shardcache.cache.listings.shard_listing import Listing
from shardcache.errors import CapacityError
from shardcache.shared.units import size

_POSITION_BYTES = 64  # memory taken by a position of a plan


class Planned(Protocol):
    """A reader with its plan."""

    listing: Listing | None
    order: "array[int]"  # whose class cannot be subscripted before Python 3.12


class PlanMemory:
    """Memory of all plans; a list of shards that several of them have counts once.

    Args:
        plans: a view of those of all connected readers.
        limit_bytes: for all of them together; one plan may take half of it.
    """

    def __init__(self, plans: Collection[Planned], limit_bytes: int) -> None:
        self._plans = plans
        self._limit_bytes = limit_bytes

    def check(self, plan: Planned, listing: Listing, added: int) -> None:
        """Raise CapacityError if a plan takes too much memory, alone or with all others.

        Args:
            plan: the plan that is to grow.
            listing: its list of shards.
            added: the number of positions that it is to get.
        """
        own_positions = len(plan.order) + added
        own_bytes = _POSITION_BYTES * own_positions + listing.memory_bytes
        _check_limit("the plan takes", own_bytes, self._limit_bytes // 2)

        listings = {each.listing for each in self._plans if each.listing is not None}
        listings.add(listing)
        positions = sum(len(each.order) for each in self._plans) + added
        listings_bytes = sum(each.memory_bytes for each in listings)
        all_bytes = _POSITION_BYTES * positions + listings_bytes
        _check_limit("all plans together take", all_bytes, self._limit_bytes)


def _check_limit(what: str, taken_bytes: int, limit_bytes: int) -> None:
    if taken_bytes > limit_bytes:
        limit = size(limit_bytes)
        raise CapacityError(
            f"{what} {size(taken_bytes)} of the daemon's memory; the limit is {limit}",
            remedy="start the daemon with more --plan-memory, or write fewer and larger shards",
        )
