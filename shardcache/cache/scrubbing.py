"""Scrubbing: slow, continuous re-reading of all published shards, as disks do not report silent bit errors."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Self

from shardcache.cache.disk import Quarantine
from shardcache.errors import CorruptShardError
from shardcache.store.folder import is_key
from shardcache.store.shard import Shard

_KIND = "scrub"
# Interval for saving the position: a restart repeats at most this much scrubbing.
_SAVE_S = 30.0
# Opening a file counts as reading this much.
_MIN_BYTES = 64 * 1024


@dataclass(slots=True)
class ScrubProgress:
    """Progress of the round. Shards are checked in the order of their keys, which are hashes.

    Attributes:
        key: the last key checked in this round; the one after it has gone unchecked for longest.
        begun_s: start of the round, seconds since the epoch.
        ended_s: end of the last complete round; None before the first.
    """

    key: str = ""
    begun_s: float = 0.0
    ended_s: float | None = None

    @classmethod
    def from_row(cls, row: object) -> Self:
        """Return the progress saved in the catalogue; a fresh start if there is none or it is invalid."""
        match row:
            case [str(key), int() | float() as begun_s, int() | float() | None as ended_s] if key == "" or is_key(key):
                return cls(key, begun_s, ended_s)
        return cls()


class Scrubber:
    """Checks one shard after another against its checksums, at a bounded rate.

    Args:
        rate_bytes_per_s: reading rate; 0 disables scrubbing.
        pause_s: time between the end of one round and the start of the next.
    """

    def __init__(self, quarantine: Quarantine, rate_bytes_per_s: int, pause_s: float) -> None:
        self._quarantine = quarantine
        self._health = quarantine.health
        self._store = quarantine.inventory.store
        self._changed = quarantine.inventory.changed
        self._rate_bytes_per_s = rate_bytes_per_s
        self._pause_s = pause_s
        self._progress = ScrubProgress()
        self._saved_s = time.monotonic()
        self._read_bytes = 0
        self._shards = 0
        self._found = 0

    def __repr__(self) -> str:
        return f"Scrubber({self._progress!r}, read_bytes={self._read_bytes}, corrupt={self._found})"

    def to_json(self) -> dict[str, Any]:
        """Return the rate, totals since the start, the round's progress and start, and the end of the last round."""
        progress = self._progress
        return {
            "rate_bytes_per_s": self._rate_bytes_per_s,
            "scrubbed_bytes": self._read_bytes,
            "scrubbed_shards": self._shards,
            "corrupt": self._found,
            "round_share": round(int(progress.key or "0", 16) / 16 ** len(progress.key), 4),
            "round_begun_at_s": progress.begun_s or None,
            "last_round_ended_at_s": progress.ended_s,
        }

    async def run(self) -> None:
        """Scrub in rounds until cancelled."""
        if not self._rate_bytes_per_s:
            return
        self._progress = ScrubProgress.from_row(await self._store.catalogue.get(_KIND))
        while True:
            await asyncio.sleep(self._pause_left_s())
            keys = sorted(self._store.shards)
            if keys and self._health.error is None:
                await self._round(keys)
            else:
                await self._changed.wait()

    def _pause_left_s(self) -> float:
        """Return the time until the next round; 0 during a round and before the first."""
        ended_s = self._progress.ended_s
        if self._progress.key or ended_s is None:
            return 0.0
        return min(self._pause_s, max(0.0, ended_s + self._pause_s - time.time()))  # the clock may be set back

    async def _round(self, keys: list[str]) -> None:
        """Check the shards after the position reached."""
        progress = self._progress
        progress.begun_s = progress.begun_s or time.time()
        for key in keys[bisect_right(keys, progress.key) :]:
            shard = self._store.shards.get(key)
            if shard is not None and not await self._check(shard):
                return  # the disk is failing: continue from here once it recovers
            progress.key = key
            if time.monotonic() - self._saved_s > _SAVE_S:
                await self._save(progress)
        ended = ScrubProgress(ended_s=time.time())
        await self._save(ended)
        self._progress = ended  # shown only once saved: a restart must not repeat a round already reported as complete

    async def _check(self, shard: Shard) -> bool:
        """Check one shard; False if the disk itself has failed."""
        try:
            await self._read(shard)
            self._shards += 1
        except FileNotFoundError:
            pass  # evicted while it was read
        except CorruptShardError as exn:
            if self._store.shards.get(shard.key) is shard:
                found = await self._quarantine.found(shard, exn)
                self._found += found
                return found
        return True

    async def _read(self, shard: Shard) -> None:
        """Read a shard; raise CorruptShardError if it is damaged. Not held: it may be evicted during the read."""
        begun_s, scrub = time.monotonic(), self._store.scrub(shard.key, await self._store.facts(shard))
        await asyncio.sleep(_MIN_BYTES / self._rate_bytes_per_s)
        while size_bytes := await asyncio.to_thread(scrub.step):
            self._read_bytes += size_bytes
            ahead_s = scrub.read_bytes / self._rate_bytes_per_s - (time.monotonic() - begun_s)
            await asyncio.sleep(max(0.0, ahead_s))

    async def _save(self, progress: ScrubProgress) -> None:
        self._saved_s = time.monotonic()
        await self._store.catalogue.put([progress.key, progress.begun_s, progress.ended_s], _KIND)
