"""The plans of all readers: names of shards and the keys that they map to, plan entries, and the schedule as of now.

A plan names a shard by its cache key if the manifest gave the version, otherwise by its url. If the origin then
reports a different version, an alias maps the name to that version's key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from weakref import WeakValueDictionary

from shardcache.cache.waits import Holder
from shardcache.plan.schedule import Schedule
from shardcache.protocol import ShardRef
from shardcache.store.folder import shard_key

_NEVER_S = float("-inf")
# Number of names whose answer from the origin is remembered, in addition to those of cached shards.
_REMEMBERED = 200_000

# Assumed duration of a transfer until one has been measured, and the weight of a new measurement.
_GUESS_S = 5.0
_NEWEST = 0.2


def name_of(ref: ShardRef) -> str:
    """Return the name of a shard in plans."""
    return ref.url if ref.version is None else shard_key(ref.url, ref.version)


@dataclass(slots=True)
class _Answer:
    """The origin's answer for a name: when it was last checked, and the size of the object."""

    checked_at_s: float = _NEVER_S
    size_bytes: int | None = None


class AliasTable:
    """Names of shards and the keys that they map to.

    Args:
        cached: the keys of the cached shards.
        remembered: limit on the other names remembered; the oldest are forgotten, and the origin is asked again.
    """

    def __init__(self, cached: Container[str] = (), remembered: int = _REMEMBERED) -> None:
        self._cached = cached
        self._remembered = remembered
        self._alias: dict[str, str] = {}
        self._aliases: dict[str, set[str]] = {}
        self._answers: dict[str, _Answer] = {}
        self._renamed: Callable[[str, tuple[str, ...]], None] | None = None

    def __repr__(self) -> str:
        return f"AliasTable({len(self._answers)} remembered, {len(self._alias)} aliased)"

    def __len__(self) -> int:
        return len(self._answers)

    def watch(self, renamed: Callable[[str, tuple[str, ...]], None]) -> None:
        """Call `renamed` with a name, its old key and its new key whenever the key changes."""
        self._renamed = renamed

    def key(self, name: str) -> str:
        """Return the key that the name is known to map to; the name itself if it has no alias."""
        return self._alias.get(name, name)

    def names(self, key: str) -> set[str]:
        """Return every name that maps to a key."""
        others = self._aliases.get(key)
        return {key, *others} if others else {key}

    def checked_at_s(self, name: str) -> float:
        """Return when the origin last confirmed the name's key, by the monotonic clock; -inf if never."""
        answer = self._answers.get(name)
        return _NEVER_S if answer is None else answer.checked_at_s

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
        if self._renamed is not None:
            self._renamed(name, (previous, key))

    def size_bytes(self, name: str) -> int | None:
        """Return the size that the origin reported for the shard, or None."""
        answer = self._answers.get(name)
        return None if answer is None else answer.size_bytes

    def learn_size(self, name: str, size_bytes: int) -> None:
        """Note the size of a shard that is not cached."""
        self._answer(name).size_bytes = size_bytes

    def forget(self, key: str) -> None:
        """Drop the aliases of a shard that was removed."""
        for name in self.names(key):
            self._unlink(name)
            if name in self._answers:
                self._answers[name].checked_at_s = _NEVER_S

    def _answer(self, name: str) -> _Answer:
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _Answer()
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


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Planned:
    """A plan entry: a shard and its name in the cache."""

    name: str
    ref: ShardRef


class PlannedShards:
    """The entries of all plans, one object per shard, which disappears with the last plan that names it.

    Otherwise, 64 readers of ten thousand shards would keep 64 copies of each entry in memory, all of which the garbage
    collector would scan while the daemon stands still.
    """

    def __init__(self) -> None:
        self._shards: WeakValueDictionary[tuple[str, str | None, int | None, int | None], Planned]
        self._shards = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"PlannedShards({len(self._shards)})"

    def __len__(self) -> int:
        return len(self._shards)

    def of(self, ref: ShardRef) -> Planned:
        """Return the shared entry for a shard."""
        row = (ref.url, ref.version, ref.size_bytes, ref.samples)
        planned = self._shards.get(row)
        if planned is None:
            planned = self._shards[row] = Planned(name_of(ref), ref)
        return planned


class Planner:
    """The schedule with a clock, and the lead time that a fetch needs.

    Attributes:
        aliases: the names that plans use.
        lead_s: time before a shard's need from which its fetch may evict planned ones: the mean duration of transfers.
    """

    def __init__(self, cached: Container[str] = ()) -> None:
        self.aliases = AliasTable(cached)
        self.lead_s = _GUESS_S
        self._schedule: Schedule[Holder] = Schedule(self.aliases)
        self.aliases.watch(self._schedule.renamed)

    def __repr__(self) -> str:
        return f"Planner({self._schedule!r}, lead_s={self.lead_s:.3g})"

    @property
    def now(self) -> Schedule[Holder]:
        """The schedule, advanced to the present time."""
        self._schedule.tick(time.monotonic())
        return self._schedule

    def learn(self, transfer_s: float) -> None:
        """Record the duration of a transfer, from its first request for bytes to publication."""
        self.lead_s += _NEWEST * (transfer_s - self.lead_s)
