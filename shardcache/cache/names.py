"""From what a plan calls a shard to the file that serves it.

A plan names a shard by its cache key where the manifest knew the version, by its url where it did not. What the
store really held when it was asked may be another version; the alias then leads on to that version's key.
"""

from __future__ import annotations

from collections.abc import Callable

from shardcache.protocol import ShardRef
from shardcache.store.layout import shard_key


class Names:
    """Names of shards and the keys that they lead to."""

    def __init__(self) -> None:
        self._alias: dict[str, str] = {}
        self._checked_at_s: dict[str, float] = {}
        self._names: dict[str, set[str]] = {}
        self._size_bytes: dict[str, int] = {}
        self._renamed: Callable[[str, tuple[str, ...]], None] | None = None

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
        return self._checked_at_s.get(name, float("-inf"))

    def learn(self, name: str, key: str, now_s: float) -> None:
        """Note that the store answered with the version `key` when it was asked for `name`."""
        self._checked_at_s[name] = now_s
        former = self.key(name)
        if former == key:
            return
        if self._alias.pop(name, None) is not None:
            self._names[former].discard(name)
        if name != key:
            self._alias[name] = key
            self._names.setdefault(key, set()).add(name)
        if self._renamed is not None:
            self._renamed(name, (former, key))

    def size_bytes(self, name: str) -> int | None:
        """Return the size that the store gave when it was asked for a shard which had no room, or None."""
        return self._size_bytes.get(name)

    def learn_size(self, name: str, size_bytes: int) -> None:
        """Note the size of a shard that is not here."""
        self._size_bytes[name] = size_bytes

    def forget(self, key: str) -> None:
        """Drop what leads to a shard that was removed."""
        for name in self._names.pop(key, set()):
            del self._alias[name]
            self._checked_at_s.pop(name, None)
        self._checked_at_s.pop(key, None)
