"""The live view of the dashboard: present waits, and needs of the next minutes.

The view is refreshed at most once a second, however many dashboard pages are open, and only while a
page is open. Predicting the needs may take long on a node with many shards, so they are refreshed
less often there.

A use is one reader's predicted need of one shard. A lane shows the uses of one job. A gap is a use
of a shard that is not cached. `job_timelines` has these classes.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.planner import Planner
from shardcache.cache.readers.connected_reader import LISTING, Reader
from shardcache.cache.readers.readers import Readers
from shardcache.cache.views.job_timelines import (
    HORIZON_S,
    MAX_USES,
    Lane,
    Presence,
    Use,
    soonest_gaps,
)
from shardcache.cache.views.reasons import Reasons
from shardcache.cache.views.visibility import Visible, shown
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.turns import Turns
from shardcache.cache.waiting.waits import JobKey, Wait, longest_wait
from shardcache.shared.protocol import Json
from shardcache.store.store import Store

# Minimum interval between refreshes. Pages ask at a slightly longer interval, so no page gets the
# same state twice.
_PERIOD_S = 0.9
_LANES_SHARE = 0.04  # maximum fraction of the time that is spent on refreshing the lanes


class LiveView:
    """Data that open dashboard pages show in addition to the status page.

    Attributes:
        refreshes: the number of refreshes so far.
    """

    def __init__(
        self,
        store: Store,
        planner: Planner,
        readers: Readers,
        transfers: Transfers,
        reasons: Reasons,
        turns: Turns,
    ) -> None:
        self.refreshes = 0
        self._readers = readers
        self._transfers = transfers
        self._store = store
        self._planner = planner
        self._reasons = reasons
        self._turns = turns
        self._lanes: list[Lane] = []
        self._refresh_lock = asyncio.Lock()
        # Times by the monotonic clock: of the last refresh, and from which on a refresh includes
        # the lanes.
        self._refreshed_s = -math.inf
        self._lanes_due_s = -math.inf

    async def refresh(self) -> None:
        """Refresh the view, and its lanes if they are due. No-op soon after another refresh."""
        async with self._refresh_lock:
            begun_s = time.monotonic()
            if begun_s - self._refreshed_s < _PERIOD_S:
                return
            self._refreshed_s = begun_s
            if begun_s >= self._lanes_due_s:
                self._lanes = await self._present_lanes()
                took_s = time.monotonic() - begun_s
                self._lanes_due_s = begun_s + took_s / _LANES_SHARE
            self.refreshes += 1

    def to_json(self, visible: Visible) -> Json:
        """Return the present waits, and the lanes and gaps as of the last refresh.

        Urls that are not `visible` are hidden.
        """
        return {
            "waits": list(self._waits(visible)),
            "lanes": [lane.to_json(visible) for lane in self._lanes],
            "gaps": [use.to_json(visible) for use in soonest_gaps(self._lanes)],
        }

    def _waits(self, visible: Visible) -> Iterator[Json]:
        """Yield, for each job and each shard or listing, how many readers wait for it, and why."""
        yield from self._waits_for_listings(visible)
        for transfer in self._transfers.all():
            yield from self._waits_for_transfer(transfer, visible)

    def _waits_for_listings(self, visible: Visible) -> Iterator[Json]:
        """Yield the waits of readers whose patterns are being resolved, by job and pattern."""
        waiting: defaultdict[tuple[JobKey, str], list[Reader]] = defaultdict(list)
        for reader in self._readers:
            if reader.unresolved:
                pattern = self._reasons.awaited_pattern(reader.unresolved)
                waiting[reader.client, pattern].append(reader)
        for (client, pattern), readers in waiting.items():
            job, uid = client
            reason = LISTING
            if visible(pattern):
                reason = self._reasons.of_listing([pattern])
            yield {
                "job": job,
                "uid": uid,
                "readers": len(readers),
                "for_s": longest_wait_s(readers),
                "url": shown(pattern, visible),
                "reason": reason,
            }

    def _waits_for_transfer(self, transfer: Transfer, visible: Visible) -> Iterator[Json]:
        """Yield, for each job, the waits of its readers for the shard of a transfer.

        Only readers that have nothing else to read count as waiting.
        """
        waits_by_client: defaultdict[JobKey, list[Wait]] = defaultdict(list)
        for wait in transfer.waits:
            if wait.idle_since_s is not None:
                assert wait.client is not None  # a caller without a job never counts as waiting
                waits_by_client[wait.client].append(wait)
        url = transfer.ref.url
        for client, waits in waits_by_client.items():
            job, uid = client
            longest = longest_wait(waits)
            assert longest is not None
            assert longest.idle_since_s is not None
            if visible(url):
                reason = self._reasons.of_wait(longest, transfer)
            else:
                # The user sees the stage alone, and not its cause. A range may be in another stage
                # than the transfer. A wait for more of an arriving object has no stages.
                stages = longest.stages or transfer.stages
                reason = stages.present.value
            yield {
                "job": job,
                "uid": uid,
                "readers": len(waits),
                "for_s": round(time.monotonic() - longest.idle_since_s, 1),
                "url": shown(url, visible),
                "reason": reason,
            }

    async def _present_lanes(self) -> list[Lane]:
        """Return a lane for each job with readers."""
        lanes: dict[JobKey, Lane] = {}
        for reader in self._readers:
            await self._turns.wait()  # this lets other tasks run
            lane = lanes.setdefault(reader.client, Lane(reader.client))
            lane.add(self._uses(reader))
        return list(lanes.values())

    def _uses(self, reader: Reader) -> list[Use]:
        """Return a reader's uses of shards within the horizon, soonest first."""
        schedule = self._planner.schedule
        now_s = schedule.now_s
        uses: list[Use] = []
        for use_s, position, name in schedule.ahead(reader, now_s + HORIZON_S, MAX_USES):
            in_s = max(0.0, use_s - now_s)
            url = reader.ref(position).url
            uses.append(Use(in_s, url, reader.client, self._presence(name)))
        return uses

    def _presence(self, name: str) -> Presence:
        """Return the state of a shard: whether it is cached, or will be.

        Args:
            name: the shard's name in plans.
        """
        if self._planner.key(name) in self._store.shards:
            return Presence.CACHED
        if name in self._transfers:
            return Presence.FETCHING
        if name in self._transfers.failures:
            return Presence.FAILED
        return Presence.MISSING


def longest_wait_s(readers: Iterable[Reader]) -> float | None:
    """Return the length of the longest present wait of these readers; None if none waits."""
    waiting_since_s = [reader.clock.since_s for reader in readers]
    starts_s = [since_s for since_s in waiting_since_s if since_s is not None]
    if not starts_s:
        return None
    return round(time.monotonic() - min(starts_s), 1)
