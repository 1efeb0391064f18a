"""The schedule as of now, with the names and keys of the shards that plans name.

A plan names a shard by its cache key if the manifest gave the version, otherwise by its url. If
the origin then reports a different version, an alias maps the name to that version's key.
"""

import time
from collections.abc import Container
from dataclasses import dataclass

from shardcache.cache.waiting.waits import Holder
from shardcache.plan.schedule import Schedule

_NEVER_S = float("-inf")

# Number of names whose answer from the origin is remembered, in addition to those of cached shards.
_REMEMBERED = 200_000

# Assumed duration of a transfer until one has been measured.
_GUESS_S = 5.0
# Weight of a new measurement in the mean.
_WEIGHT = 0.2


@dataclass(slots=True)
class _Answer:
    """The origin's answer for a name.

    Attributes:
        checked_at_s: the last time at which the origin confirmed the name's key.
        size_bytes: the object's size, if the origin gave it.
    """

    checked_at_s: float = _NEVER_S
    size_bytes: int | None = None


_NO_ANSWER = _Answer()


class Planner:
    """The schedule with a clock, and the keys of the names that its plans use.

    Attributes:
        lead_s: the time before a shard's need from which its fetch may evict planned shards: the
            mean duration of transfers.
    """

    def __init__(self, cached: Container[str] = (), remembered: int = _REMEMBERED) -> None:
        """Begin with no plans.

        Args:
            cached: keys of the cached shards, whose names are remembered beyond the limit.
            remembered: the number of names whose answer from the origin is remembered.
        """
        self.lead_s = _GUESS_S
        self._cached = cached
        self._remembered = remembered
        self._key_of: dict[str, str] = {}  # by name, its key if that is not the name itself
        self._aliases: dict[str, set[str]] = {}  # by key, the other names that map to it
        self._answers: dict[str, _Answer] = {}  # by name, oldest first
        self._schedule: Schedule[Holder] = Schedule(self)

    def __repr__(self) -> str:
        remembered = len(self._answers)
        return f"Planner({self._schedule!r}, {remembered} remembered, lead_s={self.lead_s:.3g})"

    @property
    def now(self) -> Schedule[Holder]:
        """The schedule, advanced to the present time."""
        self._schedule.tick(time.monotonic())
        return self._schedule

    def took(self, transfer_s: float) -> None:
        """Record the duration of a transfer, from its first request for bytes to publication."""
        self.lead_s += _WEIGHT * (transfer_s - self.lead_s)

    def key(self, name: str) -> str:
        """Return the key that the name is known to map to; the name itself if it has no alias."""
        return self._key_of.get(name, name)

    def names(self, key: str) -> set[str]:
        """Return every name that maps to a key."""
        return {key, *self._aliases.get(key, ())}

    def checked_at_s(self, name: str) -> float:
        """Return when the origin last confirmed the name's key, by the monotonic clock.

        It is -inf if the origin never did.
        """
        return self._answers.get(name, _NO_ANSWER).checked_at_s

    def learn(self, name: str, key: str, now_s: float) -> None:
        """Note that the origin's present version of `name` is the one under `key`."""
        self._answer(name).checked_at_s = now_s
        previous = self.key(name)
        if previous == key:
            return
        self._unlink(name)
        if name != key:
            self._key_of[name] = key
            self._aliases.setdefault(key, set()).add(name)
        self._schedule.renamed(name, (previous, key))

    def size_bytes(self, name: str) -> int | None:
        """Return the size that the origin reported for the shard, or None."""
        return self._answers.get(name, _NO_ANSWER).size_bytes

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
        """Return the answer for a name; a new one if there is none yet."""
        answer = self._answers.get(name)
        if answer is None:
            answer = _Answer()
            self._answers[name] = answer
            self._forget_oldest()
        return answer

    def _forget_oldest(self) -> None:
        """Examine the two oldest answers: those of cached shards stay, and become the newest.

        One answer is added at a time, so removing up to two keeps the others within the limit.
        """
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
        """Remove the alias of a name, if it has one."""
        key = self._key_of.pop(name, None)
        if key is not None:
            self._aliases[key].discard(name)
            if not self._aliases[key]:
                del self._aliases[key]
