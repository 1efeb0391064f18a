"""Services of the cache that all connected readers use, as one argument of `Reader`."""

from dataclasses import dataclass

from shardcache.cache.fetching.leasing import Leasing
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.turns import Turns
from shardcache.telemetry.metrics import Counters


@dataclass(frozen=True, slots=True)
class ReaderServices:
    """Services that all readers use.

    Attributes:
        planner: the schedule, which readers' plans are part of.
        residency: the cached shards, which leases keep from eviction.
        transfers: the transfers in progress.
        leasing: finds or fetches shards.
        counters: the daemon's counters.
        turns: turns on the event loop, for plans that take long to process.
        changed: notified when a plan, a wait or a lease has changed.
    """

    planner: Planner
    residency: Residency
    transfers: Transfers
    leasing: Leasing
    counters: Counters
    turns: Turns
    changed: Signal
