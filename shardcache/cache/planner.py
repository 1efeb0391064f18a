"""The schedule as of now, with the names and keys of the shards that plans name.

The schedule has the plans of all readers, each of which lists the shards to read. The cache keeps a
shard under a key, which is made of a url and a version. A plan names a shard by its key if the
manifest gave the version, otherwise by its url. Once the origin has reported a version for a name,
an alias maps the name to the key of that version, if the two differ. All services of the cache ask
the `Planner` which shards are needed when.

Names and schedule are one class, because almost every class that uses names uses the schedule, too;
and because a name that gets another key (`learn`) changes what the schedule may evict.
"""

import time
from collections.abc import Container
from dataclasses import dataclass

from shardcache.cache.waiting.waits import Holder
from shardcache.plan.schedule import Schedule

_UNCHECKED_S = float("-inf")  # time of the last check of a name that has to be checked again

# Number of names for which the origin's answer is remembered, in addition to the names of cached
# shards.
_REMEMBERED = 200_000

# Duration of a transfer that is assumed until transfers have been measured.
_ASSUMED_TRANSFER_S = 5.0
# Weight of a new measurement in the mean duration.
_NEW_WEIGHT = 0.2
# Interval at which the schedule is advanced. Each time takes 0.5 µs for each plan, and readers of
# small ranges use the schedule thousands of times a second.
_TICK_S = 0.001


@dataclass(slots=True)
class _Answer:
    """The origin's answer for a name.

    Attributes:
        checked_at_s: time at which the origin last confirmed the name's key, by the monotonic
            clock.
        size_bytes: the object's size; None if the origin did not give it.
    """

    checked_at_s: float = _UNCHECKED_S
    size_bytes: int | None = None


_NO_ANSWER = _Answer()


class Planner:
    """The schedule with a clock, and the keys of the names that its plans use.

    Attributes:
        lead_s: the lead time, which is the mean duration of transfers. Planned shards may be
            evicted for a shard that is needed within this time.
    """

    def __init__(self, cached: Container[str] = (), remembered: int = _REMEMBERED) -> None:
        """Begin with no plans.

        Args:
            cached: keys of the cached shards, whose names are remembered beyond the limit.
            remembered: the number of names whose answer from the origin is remembered.
        """
        self.lead_s = _ASSUMED_TRANSFER_S
        self._cached = cached
        self._remembered = remembered
        self._key_of: dict[str, str] = {}  # by name, its key, for names that have an alias
        self._aliases: dict[str, set[str]] = {}  # by key, the names that `_key_of` maps to it
        self._answers: dict[str, _Answer] = {}  # the origins' answers by name, oldest first
        self._schedule: Schedule[Holder] = Schedule(self)

    def __repr__(self) -> str:
        remembered = len(self._answers)
        return f"Planner({self._schedule!r}, {remembered} remembered, lead_s={self.lead_s:.3g})"

    @property
    def schedule(self) -> Schedule[Holder]:
        """The schedule, advanced to the present time, or to at most `_TICK_S` before it."""
        now_s = time.monotonic()
        if now_s >= self._schedule.now_s + _TICK_S:
            self._schedule.tick(now_s)
        return self._schedule

    def record_duration(self, transfer_s: float) -> None:
        """Record the duration of a transfer, from its first request for bytes to publication."""
        self.lead_s += _NEW_WEIGHT * (transfer_s - self.lead_s)

    def key(self, name: str) -> str:
        """Return the key that a name maps to, as far as is known; without an alias, the name."""
        return self._key_of.get(name, name)

    def names(self, key: str) -> set[str]:
        """Return every name that maps to a key."""
        return {key, *self._aliases.get(key, ())}

    def checked_at_s(self, name: str) -> float:
        """Return when the origin last confirmed the name's key, by the monotonic clock.

        -inf if the origin has never confirmed it.
        """
        return self._answers.get(name, _NO_ANSWER).checked_at_s

    def learn(self, name: str, key: str, checked_at_s: float) -> None:
        """Record that the origin's present version of a shard has this key.

        Args:
            name: the shard's name in plans.
            key: the key.
            checked_at_s: time of the origin's answer, by the monotonic clock; -inf if it is so old
                that the version has to be revalidated.
        """
        self._get_or_add_answer(name).checked_at_s = checked_at_s
        previous = self.key(name)
        if previous == key:
            return
        self._unlink(name)
        if name != key:
            self._key_of[name] = key
            self._aliases.setdefault(key, set()).add(name)
        self._schedule.renamed(name, previous_key=previous, key=key)

    def size_bytes(self, name: str) -> int | None:
        """Return the size that the origin reported for a shard; None if it is not known."""
        return self._answers.get(name, _NO_ANSWER).size_bytes

    def learn_size(self, name: str, size_bytes: int) -> None:
        """Record the size that the origin reported for a shard."""
        self._get_or_add_answer(name).size_bytes = size_bytes

    def forget(self, key: str) -> None:
        """Drop the aliases of a shard that was removed, so that its origin is asked again."""
        for name in self.names(key):
            self._unlink(name)
            if name in self._answers:
                self._answers[name].checked_at_s = _UNCHECKED_S

    def _get_or_add_answer(self, name: str) -> _Answer:
        """Return the answer for a name; add an empty one if there is none yet."""
        answer = self._answers.get(name)
        if answer is None:
            answer = _Answer()
            self._answers[name] = answer
            self._forget_oldest()
        return answer

    def _forget_oldest(self) -> None:
        """Remove the oldest answers, if there are too many; answers about cached shards stay.

        Each call looks at the two oldest, although one answer was added: the oldest may be about a
        cached shard. It then becomes the newest, and the next one goes in its place.
        """
        for _ in range(2):
            if len(self._answers) <= self._remembered:
                return
            name = next(iter(self._answers))
            answer = self._answers.pop(name)
            if self.key(name) in self._cached:
                self._answers[name] = answer
            else:
                self._unlink(name)  # so that aliases do not accumulate either

    def _unlink(self, name: str) -> None:
        """Remove the alias of a name, if it has one."""
        key = self._key_of.pop(name, None)
        if key is not None:
            self._aliases[key].discard(name)
            if not self._aliases[key]:
                del self._aliases[key]
