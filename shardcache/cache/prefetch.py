"""Fetching ahead: the soonest needed missing shard, again and again, while there is room and a free slot."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shardcache.cache.names import Names
from shardcache.cache.room import Room
from shardcache.cache.signal import Signal
from shardcache.cache.transfers import Class, Transfers
from shardcache.errors import ShardcacheError
from shardcache.plan.timeline import Timeline
from shardcache.protocol import ShardRef
from shardcache.store.space import footprint_bytes
from shardcache.store.store import Store

log = structlog.get_logger()


class Prefetcher:
    """Turns the timeline into transfers."""

    def __init__(
        self,
        timeline: Timeline,
        ref: Callable[[str], ShardRef],
        names: Names,
        store: Store,
        room: Room,
        transfers: Transfers,
        changed: Signal,
        max_transfers: int,
    ) -> None:
        self._timeline = timeline
        self._ref = ref
        self._names = names
        self._store = store
        self._room = room
        self._transfers = transfers
        self._changed = changed
        self._max_transfers = max_transfers

    async def run(self) -> None:
        """Look at every change of plans, transfers and space; until cancelled."""
        while True:
            try:
                while self._start_next():
                    pass
            except ShardcacheError as exn:  # the cache's disk: readers are told, each for itself
                log.error("cannot fetch ahead", cause=exn.message)
            await self._changed.wait()

    def _start_next(self) -> bool:
        """Start one transfer; False when there is nothing to start now."""
        planned = sum(transfer.klass is Class.PLANNED for transfer in self._transfers.all())
        if planned >= self._max_transfers:
            return False
        missing = self._timeline.next_missing(self._is_cared_for)
        if missing is None:
            return False
        name, needed_in = missing
        ref = self._ref(name)
        size_bytes = self._names.size_bytes(name) or ref.size_bytes
        # What is needed later than the soonest missing shard has even less claim to the room.
        if size_bytes is not None and self._must_wait(footprint_bytes(size_bytes), needed_in):
            return False
        self._transfers.start(name, ref, Class.PLANNED)
        return True

    def _must_wait(self, size_bytes: int, needed_in: float) -> bool:
        """Whether there is no room now; what can never have any is started, to fail and be out of the others' way."""
        possible = size_bytes <= self._store.space.capacity_bytes
        return possible and not self._room.could_fit(size_bytes, needed_in)

    def _is_cared_for(self, name: str) -> bool:
        return (
            self._names.key(name) in self._store.shards or name in self._transfers or name in self._transfers.failures
        )
