"""The cache disk: its health, and scrubbing, the slow re-reading of all shards, as disks do not report bit errors."""

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import structlog

from shardcache.cache.residency import Residency
from shardcache.cache.waits import Signal
from shardcache.errors import CorruptShardError, DiskError, DiskFullError, ExhaustedError
from shardcache.store.keys import is_key
from shardcache.store.shard import Shard

log = structlog.get_logger()

_LOOK_S = 5.0
# A full disk recovers soon, a failing one rarely: backing off keeps its kernel log from filling up.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_KIND = "scrub"  # of the row in the catalogue
# Interval for saving the position: a restart repeats at most this much scrubbing.
_SAVE_S = 30.0
_MIN_BYTES = 64 * 1024  # opening a file counts as reading this much
_MAX_TIME_S = 2**40  # since the epoch


class Health:
    """Health of the cache disk: checked periodically, right after an error, and with backoff while it fails."""

    def __init__(self, residency: Residency) -> None:
        self.error: DiskError | None = None  # with an error, cached shards are served but none is fetched
        self.residency = residency
        self._store = residency.store
        self._since_s = time.monotonic()
        self._suspicion = asyncio.Event()
        self._suspicion.set()  # not checked yet
        self._looked = Signal()
        self._looking = False
        self._asked_s: float | None = None

    def __repr__(self) -> str:
        return f"Health({'well' if self.error is None else self.error.code!r})"

    def check(self, url: str) -> None:
        """Raise the disk's present error, if any, naming the url that cannot be fetched because of it."""
        if self.error is not None:
            raise type(self.error)(self.error.message, url=url, remedy=self.error.remedy)

    async def examine(self) -> bool:
        """Check the disk after a failure on it; return whether it is healthy, immediately if it is known to fail."""
        if self.error is None:
            self._suspicion.set()
        looks = self._looked.count + 1 + self._looking  # a check in progress may predate the failure
        while self.error is None and self._looked.count < looks:
            await self._looked.wait()
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        """Return `state` (`ok`, or the error's code), `error` and `since_s`, the time in this state.

        `silent_s` is the age of a check still without a result: a disk that hangs does not even return an error.
        """
        now_s = time.monotonic()
        silent_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        times = {"since_s": round(now_s - self._since_s, 3), "silent_s": round(silent_s, 3)}
        if self.error is None:
            return {"state": "ok", "error": None, **times}
        return {"state": self.error.code, "error": self.error.to_json(), **times}

    async def found(self, shard: Shard, exn: CorruptShardError) -> bool:
        """Take a corrupt shard out of service; False if the disk has failed, which proves nothing about the shard."""
        if not await self.examine():
            return False
        shard.damage = exn
        if shard.leases:
            log.error("corrupt shard is in use", shard=exn.url, leases=shard.leases)
        await self.residency.isolate(shard, exn)
        return True

    async def lost(self) -> None:
        """Return once the cache folder was found deleted with the folder around it."""
        while not self._store.folder.is_lost:
            await self._looked.wait()

    async def run(self) -> None:
        """Monitor the disk until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.error is None:
                pause_s = _FIRST_PAUSE_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._suspicion.wait()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._look()

    async def _look(self) -> None:
        suspected = self._suspicion.is_set() or self.error is not None
        self._suspicion.clear()
        self._looking = True
        try:
            changed = await (self._probe() if suspected else self._ask(self._store.folder.look))
            await asyncio.to_thread(self._store.catalogue.reopen)
            if changed or self.error is not None:
                await self.residency.reconcile()
            await self.residency.keep_free()
        except DiskError as exn:
            self._turn(exn)
        except ExhaustedError as exn:  # says nothing about the disk
            log.warning("cannot check the cache disk", cause=exn.message)
        else:
            self._turn(None)
        finally:
            self._looking = False
            self._looked.notify()

    async def _probe(self) -> bool:
        try:
            return await self._ask(self._store.folder.probe)
        except DiskFullError:  # other programs fill the disk
            await self.residency.keep_free()
        return await self._ask(self._store.folder.probe)

    async def _ask(self, question: Callable[[], bool]) -> bool:
        self._asked_s = time.monotonic()
        try:
            return await asyncio.to_thread(question)
        finally:
            self._asked_s = None

    def _turn(self, error: DiskError | None) -> None:
        previous, self.error = self.error, error
        if type(previous) is type(error):
            return
        self.residency.changed.notify()
        lasted_s, self._since_s = time.monotonic() - self._since_s, time.monotonic()
        if error is None:
            log.warning("cache disk has recovered", after_s=round(lasted_s, 1))
        else:
            log.error("cache disk error; serving cached shards only", cause=error.message, remedy=error.remedy)


@dataclass(slots=True)
class ScrubProgress:
    """Progress of the round, in seconds since the epoch. Shards are checked in the order of their keys, hashes."""

    key: str = ""  # the last one checked in this round; the one after it has gone unchecked for longest
    begun_s: float = 0.0
    ended_s: float | None = None  # of the last complete round; None before the first

    @classmethod
    def from_row(cls, row: object) -> Self:
        """Return the progress saved in the catalogue; a fresh start if there is none or it is invalid."""
        match row:
            case [str(key), int() | float() as begun_s, int() | float() | None as ended_s] if key == "" or is_key(key):
                if _is_time(begun_s) and (ended_s is None or _is_time(ended_s)):
                    return cls(key, begun_s, ended_s)
        return cls()


def _is_time(value: float) -> bool:
    """Return True for seconds that a clock may show: JSON also has larger numbers, infinity and NaN."""
    return 0 <= value < _MAX_TIME_S and not isinstance(value, bool)


class Scrubber:
    """Checks one shard after another, at a bounded rate; 0 disables it. Rounds are at least `pause_s` apart."""

    def __init__(self, health: Health, rate_bytes_per_s: int, pause_s: float) -> None:
        self._health = health
        self._store = health.residency.store
        self._rate_bytes_per_s = rate_bytes_per_s
        self._pause_s = pause_s
        self._progress = ScrubProgress()
        self._saved_s = time.monotonic()
        self._read_bytes = 0
        self._shards = 0
        self._found = 0

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
                await self._health.residency.changed.wait()

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
                found = await self._health.found(shard, exn)
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
