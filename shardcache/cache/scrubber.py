"""Scrubbing: the slow re-reading of all shards and parts, as disks do not report bit errors.

One task of the cache runs `Scrubber.run`. A round checks every shard once, in the order of the
keys, which are hashes. It then checks the cached parts of objects, which readers of ranges use. The
position in the round is saved in the catalogue, so that a restarted daemon continues there.
"""

import asyncio
import time
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Self

import structlog

from shardcache.cache.disk_health import DiskHealth
from shardcache.cache.space.part_residency import PartResidency
from shardcache.cache.waiting.signals import Signal
from shardcache.shared.exceptions import CorruptShardError, DiskError
from shardcache.store.keys import is_key, stored_url
from shardcache.store.part_file import PartFile
from shardcache.store.shard import Shard
from shardcache.store.store import Store

log = structlog.get_logger()

_ROW_KIND = "scrub"  # kind of the row in the catalogue

# Interval at which the position is saved. A restart repeats at most this much scrubbing.
_SAVE_S = 30.0
_MIN_BYTES = 64 * 1024  # opening a file counts as reading this many bytes
_MAX_TIME_S = 2**40  # seconds since the epoch, later than any clock shows


@dataclass(slots=True)
class ScrubProgress:
    """Progress of the round. Times are in seconds since the epoch.

    Attributes:
        key: key of the last shard that was checked in this round; "" before the first. The shard
            with the next key has gone unchecked for longest.
        begun_s: start of this round; 0 before it has begun.
        ended_s: end of the last complete round; None if there was none yet.
    """

    key: str = ""
    begun_s: float = 0.0
    ended_s: float | None = None

    @classmethod
    def from_row(cls, row: object) -> Self:
        """Return the progress saved in the catalogue; a fresh start if it is missing or invalid."""
        match row:
            case [str(key), int() | float() as begun_s, int() | float() | None as ended_s]:
                has_key = key == "" or is_key(key)
                has_times = _is_time(begun_s) and (ended_s is None or _is_time(ended_s))
                if has_key and has_times:
                    return cls(key, begun_s, ended_s)
        return cls()

    @property
    def share(self) -> float:
        """The share of all possible keys that this round has passed, from 0 to 1."""
        if not self.key:
            return 0.0
        possible_keys: int = 16 ** len(self.key)  # keys are hexadecimal numbers
        return int(self.key, 16) / possible_keys


def _is_time(value: float) -> bool:
    """Return whether a number from JSON is a time that a clock may show.

    JSON may also have larger numbers, infinity and NaN.
    """
    return 0 <= value < _MAX_TIME_S and not isinstance(value, bool)


class Scrubber:
    """Checks one shard after another, and then the parts of objects, at a bounded rate."""

    def __init__(
        self,
        store: Store,
        health: DiskHealth,
        parts: PartResidency,
        changed: Signal,
        rate_bytes_per_s: int,
        pause_s: float,
    ) -> None:
        """Begin before the first round.

        Args:
            store: the cache folder.
            health: the health of the disk; nothing is checked while the disk fails.
            parts: the cached parts of objects.
            changed: notified when shards have come or the disk has recovered.
            rate_bytes_per_s: bytes to read per second; 0 disables scrubbing.
            pause_s: minimum time between the end of a round and the start of the next.
        """
        self._store = store
        self._health = health
        self._parts = parts
        self._changed = changed
        self._rate_bytes_per_s = rate_bytes_per_s
        self._pause_s = pause_s
        self._progress = ScrubProgress()
        self._saved_s = time.monotonic()
        # The following counts begin at the start of the daemon.
        self._read_bytes = 0
        self._intact_shards = 0
        self._corrupt = 0  # number of damaged shards and parts of objects

    def to_json(self) -> dict[str, Any]:
        """Return rate, totals since the start, progress of this round, and end of the last one."""
        progress = self._progress
        return {
            "rate_bytes_per_s": self._rate_bytes_per_s,
            "scrubbed_bytes": self._read_bytes,
            "scrubbed_shards": self._intact_shards,
            "corrupt": self._corrupt,
            "round_share": round(progress.share, 4),
            "round_begun_at_s": progress.begun_s or None,
            "last_round_ended_at_s": progress.ended_s,
        }

    async def run(self) -> None:
        """Scrub in rounds until cancelled."""
        if not self._rate_bytes_per_s:
            return
        row = await self._store.catalogue.get(_ROW_KIND)
        self._progress = ScrubProgress.from_row(row)
        while True:
            await asyncio.sleep(self._pause_left_s())
            keys = sorted(self._store.shards)
            has_any = bool(keys or self._store.parts.files())
            if has_any and self._health.error is None:
                await self._round(keys)
            else:
                await self._changed.wait()

    def _pause_left_s(self) -> float:
        """Return the time until the next round; 0 during a round and before the first."""
        ended_s = self._progress.ended_s
        is_in_round = self._progress.key != ""
        if is_in_round or ended_s is None:
            return 0.0
        left_s = max(0.0, ended_s + self._pause_s - time.time())
        return min(self._pause_s, left_s)  # it would be longer if the clock was set back

    async def _round(self, keys: list[str]) -> None:
        """Check the shards after the position that this round has reached, and then the parts.

        Args:
            keys: keys of the cached shards, sorted.
        """
        progress = self._progress
        if not progress.begun_s:
            progress.begun_s = time.time()
        first = bisect_right(keys, progress.key)
        for key in keys[first:]:
            shard = self._store.shards.get(key)
            if shard is not None:
                is_disk_healthy = await self._check_shard(shard)
                if not is_disk_healthy:
                    return  # the round continues here once the disk has recovered
            progress.key = key
            if time.monotonic() - self._saved_s > _SAVE_S:
                await self._save(progress)
        is_disk_healthy = await self._check_parts()
        if not is_disk_healthy:
            return
        ended = ScrubProgress(ended_s=time.time())  # the next round begins at the first key
        await self._save(ended)
        # The end is shown only once it is saved: a restart must not repeat a round that was
        # reported as complete.
        self._progress = ended

    async def _check_parts(self) -> bool:
        """Check the parts of all objects; return False if the disk itself has failed."""
        for file in self._store.parts.files():
            for part in file.kept_parts:
                if self._store.parts.get(file.partial.key) is not file:
                    break  # the file was removed, or taken over by a transfer of the whole object
                is_disk_healthy = await self._check_part(file, part)
                if not is_disk_healthy:
                    return False
        return True

    async def _check_part(self, file: PartFile, part: int) -> bool:
        """Check one part; return False if the disk itself has failed."""
        size_bytes = max(_MIN_BYTES, file.partial.size_of(part))
        # Each pause is as long as the reading would take at the bounded rate.
        await asyncio.sleep(size_bytes / self._rate_bytes_per_s)
        try:
            is_damaged = await self._parts.verify_part(file, part)
        except DiskError:
            return await self._health.examine()  # if the disk is healthy, the part is skipped
        self._read_bytes += size_bytes
        if is_damaged:
            self._corrupt += 1
            url = stored_url(file.partial.obj.url)
            log.error("cached part is damaged; dropped", shard=url, part=part)
        return True

    async def _check_shard(self, shard: Shard) -> bool:
        """Check one shard; return False if the disk itself has failed."""
        try:
            await self._read(shard)
            self._intact_shards += 1
        except FileNotFoundError:
            pass  # the shard was evicted while it was read
        except CorruptShardError as exn:
            if self._store.shards.get(shard.key) is not shard:
                return True  # the shard was evicted while it was read
            is_damaged = await self._health.take_out(shard, exn)
            if not is_damaged:  # the disk fails, not the shard
                return False
            self._corrupt += 1
        return True

    async def _read(self, shard: Shard) -> None:
        """Read a shard at the bounded rate; raise CorruptShardError if it is damaged.

        The shard is not retained, so it may be evicted during the read.
        """
        begun_s = time.monotonic()
        facts = await self._store.facts(shard)
        scrub = self._store.scrub(shard.key, facts)
        await asyncio.sleep(_MIN_BYTES / self._rate_bytes_per_s)  # for the opening of the files
        # Each step reads a block, and returns its size; 0 after the last.
        while size_bytes := await asyncio.to_thread(scrub.step):
            self._read_bytes += size_bytes
            due_s = scrub.read_bytes / self._rate_bytes_per_s
            spent_s = time.monotonic() - begun_s
            await asyncio.sleep(max(0.0, due_s - spent_s))

    async def _save(self, progress: ScrubProgress) -> None:
        """Save the progress in the catalogue, for the next start of the daemon."""
        self._saved_s = time.monotonic()
        row = [progress.key, progress.begun_s, progress.ended_s]
        await self._store.catalogue.put(row, _ROW_KIND)
