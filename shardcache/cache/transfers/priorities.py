"""Priorities of shards for connections, derived from their transfers and waiting readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from shardcache.cache.transfers.transfers import Class, Transfer
from shardcache.cache.transfers.waiting import Stage
from shardcache.fetch.connections.priority import Priority
from shardcache.store.inflate import codec_of


def priority(transfers: Collection[Transfer], next_use_s: Callable[[], float]) -> Priority:
    """Return the priority of a shard being downloaded.

    Args:
        transfers: all transfers that lead to it.
        next_use_s: returns the time when a plan next needs it.
    """
    waits = [wait for transfer in transfers if (wait := transfer.longest_wait())]
    beginnings = [transfer.arriving for transfer in transfers if transfer.arriving]
    readers = [party for beginning in beginnings for party in beginning.readers]
    if waits:
        longest = min(waits, key=lambda wait: wait.since_s or 0.0)
        alone = bool(readers) or (bool(beginnings) and any(wait.partial for wait in waits))
        return Priority(Class.WAITING, longest.since_s or 0.0, longest.party, alone)
    if readers:  # they will soon have read everything that has arrived
        return Priority(Class.WAITING, time.monotonic(), readers[0], alone=True)
    return Priority(min(transfer.klass for transfer in transfers), next_use_s())


def first_priority(transfer: Transfer) -> Priority:
    """Return the priority of a shard whose download has not begun, so that less urgent ones do not start first."""
    begins = transfer.stages.present is not Stage.NETWORK and codec_of(transfer.ref.url) is None
    waits = [wait for wait in transfer.waits if wait.partial and wait.since_s is not None]
    return Priority(transfer.klass, alone=begins and bool(waits))
