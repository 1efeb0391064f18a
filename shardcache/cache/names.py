"""From what a plan calls a shard to the file that serves it.

A plan names a shard by its cache key where the manifest knew the version, by its url where it did not. What the
store really held when it was asked may be another version; the alias then leads on to that version's key.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from shardcache.protocol import ShardRef
from shardcache.store.layout import shard_key

_NEVER_S = float("-inf")
# Of so many names it is remembered what the store said of them; those of shards that are here come on top.
_REMEMBERED = 200_000


@dataclass(slots=True)
class _Answer:
    """What the store said of a name: that it leads where it does, when, and the size of what is there."""

    checked_at_s: float = _NEVER_S
    size_bytes: int | None = None


class Names:
    """Names of shards and the keys that they lead to.

    Args:
        here: the keys of the shards that are in the cache.
        remembered: of how many other names at most to remember anything; the oldest are forgotten, and asked for again.
    """

    def __init__(self, here: Container[str] = (), remembered: int = _REMEMBERED) -> None:
        self._here = here
        self._remembered = remembered
        self._alias: dict[str, str] = {}
        self._names: dict[str, set[str]] = {}
        self._answers: dict[str, _Answer] = {}
        self._renamed: Callable[[str, tuple[str, ...]], None] | None = None

    def __repr__(self) -> str:
        return f"Names({len(self._answers)} asked for, {len(self._alias)} lead elsewhere)"

    def __len__(self) -> int:
        return len(self._answers)

    def watch(self, renamed: Callable[[str, tuple[str, ...]], None]) -> None:
        """Have `renamed` called with a name and the keys that it led and leads to, whenever they differ."""
        self._renamed = renamed

    @staticmethod
    def of(ref: ShardRef) -> str:
        """Return the name under which a plan knows the shard."""
        return ref.url if ref.version is None else shard_key(ref.url, ref.version)

    def key(self, name: str) -> str:
        """Return the key that the name leads to, as far as is known."""
        return self._alias.get(name, name)

    def names(self, key: str) -> set[str]:
        """Return every name that leads to a key."""
        others = self._names.get(key)
        return {key, *others} if others else {key}

    def checked_at_s(self, name: str) -> float:
        """Return when the store last said what the name leads to; long ago where it never did."""
        answer = self._answers.get(name)
        return _NEVER_S if answer is None else answer.checked_at_s

    def learn(self, name: str, key: str, now_s: float) -> None:
        """Note that the store answered with the version `key` when it was asked for `name`."""
        self._answer(name).checked_at_s = now_s
        former = self.key(name)
        if former == key:
            return
        self._unlink(name)
        if name != key:
            self._alias[name] = key
            self._names.setdefault(key, set()).add(name)
        if self._renamed is not None:
            self._renamed(name, (former, key))

    def size_bytes(self, name: str) -> int | None:
        """Return the size that the store gave when it was asked for a shard which had no room, or None."""
        answer = self._answers.get(name)
        return None if answer is None else answer.size_bytes

    def learn_size(self, name: str, size_bytes: int) -> None:
        """Note the size of a shard that is not here."""
        self._answer(name).size_bytes = size_bytes

    def forget(self, key: str) -> None:
        """Drop what leads to a shard that was removed."""
        for name in self.names(key):
            self._unlink(name)
            if name in self._answers:
                self._answers[name].checked_at_s = _NEVER_S

    def _answer(self, name: str) -> _Answer:
        answer = self._answers.get(name)
        if answer is None:
            answer = self._answers[name] = _Answer()
            self._let_go()
        return answer

    def _let_go(self) -> None:
        """Look at the two oldest answers: one came, so they never get more than they may be."""
        for _ in range(2):
            if len(self._answers) <= self._remembered:
                return
            name = next(iter(self._answers))
            answer = self._answers.pop(name)
            if self.key(name) in self._here:
                self._answers[name] = answer
            else:
                self._unlink(name)

    def _unlink(self, name: str) -> None:
        key = self._alias.pop(name, None)
        if key is not None:
            self._names[key].discard(name)
            if not self._names[key]:
                del self._names[key]
