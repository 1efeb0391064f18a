"""Facts known about shards: the names and keys that plans use, the schedule as of now, versions and sample counts.

A plan names a shard by its cache key if the manifest gave the version, otherwise by its url. If the origin then
reports a different version, an alias maps the name to that version's key.
"""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import structlog

from shardcache.access import store_of
from shardcache.cache.waits import Holder
from shardcache.errors import AccessDeniedError, OriginUnavailableError, ShardcacheError
from shardcache.metrics import Counters
from shardcache.origin.registry import Origins
from shardcache.plan.schedule import Schedule
from shardcache.protocol import ShardRef, Wanted
from shardcache.redact import redact
from shardcache.shards import Shards
from shardcache.store.keys import place_of, shard_key
from shardcache.store.shard import Facts
from shardcache.store.store import Store
from shardcache.url_names import is_shard

log = structlog.get_logger()

_NEVER_S = float("-inf")
# Number of names whose answer from the origin is remembered, in addition to those of cached shards.
_REMEMBERED = 200_000

# Assumed duration of a transfer until one has been measured, and the weight of a new measurement.
_GUESS_S = 5.0
_NEWEST = 0.2
_KIND = "shard"  # of rows in the catalogue
_MAX_SAMPLES = 2**63  # what SQLite, and the columns of a list of shards, cannot hold
_LIST_BYTES, _ROW_BYTES = 16_384, 168  # memory of a list, and of a shard in it, besides its texts: name and numbers
_READ_AT_ONCE = 256  # sidecars
_FILLED = 1_000  # shards whose sample counts are looked up at a time: more would block the event loop

# Revalidation: a reader waits this long for an answer, and nothing waits longer than the timeout.
_GRACE_S = 1.0
_TIMEOUT_S = 5.0


def name_of(ref: ShardRef) -> str:
    """Return the name of a shard in plans."""
    place = place_of(ref.url, is_file=ref.is_file)
    return shard_key(place, ref.version) if ref.version else place


class Listing:
    """The shards of a dataset, as plans name them."""

    def __init__(
        self, shards: Shards, names: Sequence[str] = (), remembered: int = 0, wanted: Wanted = "samples"
    ) -> None:
        """Build from the shards, and from their names if these are known. Blocks."""
        self.shards = shards
        self._wanted = wanted
        self.remembered = remembered  # sample counts that come from this daemon's catalogue; other nodes may lack them
        places = (place_of(url, is_file=self._is_file(url)) for url in shards.urls)
        pairs = zip(shards.urls if wanted == "samples" else places, shards.versions, strict=True)
        self.names = names or [shard_key(*pair) if pair[1] else pair[0] for pair in pairs]
        self.memory_bytes = _LIST_BYTES + _ROW_BYTES * len(shards) + len(shards.urls.text) + len(shards.versions.text)

    def _is_file(self, url: str) -> bool:
        return self._wanted in ("files", "objects") or (self._wanted == "either" and not is_shard(url))

    def ref(self, number: int) -> ShardRef:
        """Return a shard by its number, or a file if that is wanted."""
        ref = self.shards[number]
        return ref._replace(is_file=True) if self._is_file(ref.url) else ref

    def refs(self) -> Sequence[ShardRef]:
        """Return all shards and files. Blocks."""
        return self.shards if self._wanted == "samples" else [*map(self.ref, range(len(self.shards)))]

    def wanting(self, wanted: Wanted) -> "Listing":
        """Return the list of which samples, or files, are wanted. Blocks."""
        return self if wanted == self._wanted else Listing(self.shards, (), self.remembered, wanted)

    @classmethod
    def joined(cls, lists: Sequence["Listing"]) -> "Listing":
        """Return the shards of several lists, one after another. Blocks."""
        return cls(Shards.joined([each.shards for each in lists]), [name for each in lists for name in each.names])


@dataclass(slots=True)
class _Checked:
    """The origin's answer for a name: when it was last checked, and the size of the object."""

    checked_at_s: float = _NEVER_S
    size_bytes: int | None = None


_UNKNOWN = _Checked()


class Planner:
    """The schedule with a clock, the names that plans use with their keys, and the lead time that a fetch needs."""

    def __init__(self, cached: Container[str] = (), remembered: int = _REMEMBERED) -> None:
        # Time before a shard's need from which its fetch may evict planned ones: the mean duration of transfers.
        self.lead_s = _GUESS_S
        self._cached = cached  # keys of the cached shards, whose names are remembered beyond the limit
        self._remembered = remembered
        self._alias: dict[str, str] = {}
        self._aliases: dict[str, set[str]] = {}
        self._answers: dict[str, _Checked] = {}
        self._schedule: Schedule[Holder] = Schedule(self)

    def __repr__(self) -> str:
        return f"Planner({self._schedule!r}, {len(self._answers)} remembered, lead_s={self.lead_s:.3g})"

    @property
    def now(self) -> Schedule[Holder]:
        """The schedule, advanced to the present time."""
        self._schedule.tick(time.monotonic())
        return self._schedule

    def took(self, transfer_s: float) -> None:
        """Record the duration of a transfer, from its first request for bytes to publication."""
        self.lead_s += _NEWEST * (transfer_s - self.lead_s)

    def key(self, name: str) -> str:
        """Return the key that the name is known to map to; the name itself if it has no alias."""
        return self._alias.get(name, name)

    def names(self, key: str) -> set[str]:
        """Return every name that maps to a key."""
        return {key, *self._aliases.get(key, ())}

    def checked_at_s(self, name: str) -> float:
        """Return when the origin last confirmed the name's key, by the monotonic clock; -inf if never."""
        return self._answers.get(name, _UNKNOWN).checked_at_s

    def learn(self, name: str, key: str, now_s: float) -> None:
        """Note that the origin's present version of `name` is the one under `key`."""
        self._answer(name).checked_at_s = now_s
        previous = self.key(name)
        if previous == key:
            return
        self._unlink(name)
        if name != key:
            self._alias[name] = key
            self._aliases.setdefault(key, set()).add(name)
        self._schedule.renamed(name, (previous, key))

    def size_bytes(self, name: str) -> int | None:
        """Return the size that the origin reported for the shard, or None."""
        return self._answers.get(name, _UNKNOWN).size_bytes

    def learn_size(self, name: str, size_bytes: int) -> None:
        """Note the size of a shard that is not cached."""
        self._answer(name).size_bytes = size_bytes

    def forget(self, key: str) -> None:
        """Drop the aliases of a shard that was removed."""
        for name in self.names(key):
            self._unlink(name)
            if name in self._answers:
                self._answers[name].checked_at_s = _NEVER_S

    def _answer(self, name: str) -> _Checked:
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _Checked()
            self._bound()
        return answer

    def _bound(self) -> None:
        """Examine the two oldest answers. One was just added, so removing up to two keeps within the limit."""
        for _ in range(2):
            if len(self._answers) <= self._remembered:
                return
            name = next(iter(self._answers))
            answer = self._answers.pop(name)
            if self.key(name) in self._cached:
                self._answers[name] = answer
            else:
                self._unlink(name)

    def _unlink(self, name: str) -> None:
        key = self._alias.pop(name, None)
        if key is not None:
            self._aliases[key].discard(name)
            if not self._aliases[key]:
                del self._aliases[key]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The version of a url that was fetched last: a row of the catalogue."""

    version: str
    samples: int | None

    @classmethod
    def from_row(cls, row: object) -> "Fetched":
        """Build from a row's value. Raises ValueError for any other value."""
        match row:
            case [str(version), None | int() as samples] if not isinstance(samples, bool):
                version.encode()  # JSON may hold half a surrogate pair, which is no text
                if samples is None or 0 <= samples < _MAX_SAMPLES:
                    return cls(version, samples)
        raise ValueError("the row is not a version and a number of samples")

    def to_row(self) -> list[object]:
        """Return the row's value."""
        return [self.version, self.samples]


class History:
    """The last version fetched of each url and its sample count, which outlive the shard: rows of the catalogue."""

    def __init__(self, store: Store) -> None:
        self.catalogue = store.catalogue
        self.changes = 0  # number of versions and counts stored since the start
        self._store = store
        self._rebuilding = asyncio.Lock()

    async def rebuild(self, *, damaged: bool = False) -> None:
        """Restore lost rows from the sidecars, of each url the version read last; lookups wait until this is done.

        No-op if there are as many rows as shards, unless some of them are known to be `damaged`.
        """
        store = self._store
        async with self._rebuilding:
            if not damaged and await self.catalogue.count(_KIND) >= len(store.shards):
                return
            log.info("rebuilding sample counts from the sidecars", shards=len(store.shards))
            keys = list(reversed(store.shards))
            for first in range(0, len(keys), _READ_AT_ONCE):
                some = [shard for key in keys[first : first + _READ_AT_ONCE] if (shard := store.shards.get(key))]
                found = [facts for facts in await store.peek(some) if facts is not None]
                found.sort(key=lambda facts: facts.samples is None)  # of a url's shard and file, the shard
                await self.catalogue.add_many(
                    [((_KIND, each.url), Fetched(each.version, each.samples).to_row()) for each in found]
                )
            self.changes += 1

    async def remember(self, facts: Facts) -> None:
        """Store a shard's version and sample count."""
        known: Fetched | None = None
        if facts.samples is None:  # a tar fetched as a plain file keeps its count
            known = await self.catalogue.get(_KIND, facts.url, parse=Fetched.from_row)
        if known is None or known.version != facts.version:
            self.changes += 1  # first: who sees the change looks the row up after it was written
            await self.catalogue.put(Fetched(facts.version, facts.samples).to_row(), _KIND, facts.url)

    async def versions(self, urls: Sequence[str]) -> list[str | None]:
        """Return the last version fetched of each url, or None."""
        return [None if known is None else known.version for known in await self._known(urls)]

    async def fill(self, shards: Shards) -> Shards:
        """Return the shards with known sample counts filled in; one without a version gets the last version's."""
        samples = array("q", shards.samples)
        unknown = [number for number, count in enumerate(samples) if count < 0]  # an index file gives every count
        for some in (unknown[first : first + _FILLED] for first in range(0, len(unknown), _FILLED)):
            found = await self._known([shards.urls[number] for number in some])
            for number, known in zip(some, found, strict=True):
                if known and known.samples is not None and shards.versions[number] in ("", known.version):
                    samples[number] = known.samples
        return replace(shards, samples=samples)

    async def _known(self, urls: Sequence[str]) -> list[Fetched | None]:
        """Return what is known of each url; rows that turn out to be damaged are first restored from the sidecars."""
        async with self._rebuilding:
            pass
        keys = [(_KIND, redact(url)) for url in urls]
        losses = self.catalogue.losses
        found = await self.catalogue.get_many(keys, Fetched.from_row)
        if self.catalogue.losses != losses:
            await self.rebuild(damaged=True)
            found = await self.catalogue.get_many(keys, Fetched.from_row)
        return found


@dataclass(slots=True, eq=False, repr=False)
class Revalidation:
    """Asks origins for the present version of cached shards, once per shard for all readers.

    A prompt answer takes effect immediately. A slow one is awaited in the background while the cached version is
    served, and takes effect from the next lease on; until then that origin gets one such request at a time, and no
    reader waits for it. An answer stays valid for `_ttl_s`.
    """

    _store: Store
    _origins: Origins
    _planner: Planner
    _counters: Counters
    _group: asyncio.TaskGroup
    _ttl_s: float
    # Pending requests, by the shard's name, and their number, by origin.
    questions: dict[str, asyncio.Task[ShardcacheError | None]] = field(default_factory=dict, init=False)
    _under_way: Counter[str] = field(default_factory=Counter, init=False)
    _silent: set[str] = field(default_factory=set, init=False)

    async def check(self, name: str, ref: ShardRef) -> None:
        """Revalidate a cached shard unless that was done lately. Raises the origin's error if the shard is gone."""
        origin, url = store_of(ref.url), ref.url
        if not self._is_stale(name) or (origin in self._silent and self._under_way[origin]):
            return
        if name not in self.questions:
            self.questions[name] = self._group.create_task(self._ask(name, ref), name=f"revalidate {url}")
        if origin in self._silent:
            return
        answered, _ = await asyncio.wait([question := self.questions[name]], timeout=_GRACE_S)
        if not answered:
            self._silent.add(origin)
        elif (error := question.result()) is not None:
            raise error

    def stop(self) -> None:
        """Cancel the pending requests."""
        for question in list(self.questions.values()):
            question.cancel()

    def _is_stale(self, name: str) -> bool:
        old = time.monotonic() - self._planner.checked_at_s(name) > self._ttl_s
        return old and self._planner.key(name) in self._store.shards  # for a missing shard, the transfer asks

    async def _ask(self, name: str, ref: ShardRef) -> ShardcacheError | None:
        """Learn the present version, or return the error for the reader."""
        origin, asked_s = store_of(ref.url), time.monotonic()
        self._under_way[origin] += 1
        try:
            key = await self._present_key(name, ref)
        except ShardcacheError as exn:
            return exn
        finally:
            self._under_way[origin] -= 1
            del self.questions[name]
        if self._planner.checked_at_s(name) < asked_s:  # else a transfer has asked more recently
            self._planner.learn(name, key, time.monotonic())
        return None

    async def _present_key(self, name: str, ref: ShardRef) -> str:
        """Return the key of the origin's present version, or of the last known one if the origin does not answer."""
        url = ref.url
        self._counters.fetched(url, 0, 1)
        try:
            async with asyncio.timeout(_TIMEOUT_S) as limit:
                obj = await self._origins.origin(url).stat(url)
        except (OriginUnavailableError, AccessDeniedError, TimeoutError) as exn:
            log.warning("cannot revalidate the shard; serving the cached version", shard=url, cause=str(exn))
            return self._planner.key(name)
        except ShardcacheError:
            raise
        except Exception:  # a top-level guard like that of transfers: one bad shard must not end all jobs
            log.exception("unexpected error in revalidation; serving the cached version", shard=url)
            return self._planner.key(name)
        finally:
            (self._silent.add if limit.expired() else self._silent.discard)(store_of(url))
        return shard_key(place_of(url, is_file=ref.is_file), obj.version)
