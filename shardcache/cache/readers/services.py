"""Services that all connected readers use."""

from dataclasses import dataclass

from shardcache.cache.fetching.leasing import Leasing
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.space.residency import Residency
from shardcache.cache.waiting.signals import Signal
from shardcache.cache.waiting.turns import Turns
from shardcache.telemetry.metrics import Counters


@dataclass(frozen=True, slots=True)
class Shared:
    """Services that all readers use.

    Attributes:
        changed: notified when a plan, a wait or a lease has changed.
    """

    planner: Planner
    residency: Residency
    transfers: Transfers
    leasing: Leasing
    counters: Counters
    turns: Turns
    changed: Signal
