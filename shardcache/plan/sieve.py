"""Eviction order of the shards that are in no plan: SIEVE, or another policy. Pure.

SIEVE is after Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction
Algorithm for Web Caches", NSDI 2024: a queue in order of arrival and a hand that moves from the oldest to the newest. A
key used since the hand last passed it is spared once and stays in place; any other is evicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """Eviction order of the shards that no plan contains.

    A policy knows only what may be evicted: a shard that is in use or planned is gone for it, and arrives again
    afterwards.
    """

    def __contains__(self, key: str) -> bool:
        """Return whether a shard has arrived and is not gone."""

    def arrived(self, key: str, *, used: bool = False) -> None:
        """Add a shard; `used` if it was requested while cached, since it was last gone."""

    def used(self, key: str) -> None:
        """Record that one of the shards was requested."""

    def gone(self, key: str) -> None:
        """Remove a shard, if it is one of them."""

    def victims(self) -> Iterator[str]:
        """Yield all shards, the first to evict first. This alone removes none; the next call yields the same order."""


@dataclass(slots=True, eq=False)
class _Node:
    key: str
    visited: bool
    older: "_Node | None" = None
    newer: "_Node | None" = None


class Sieve:
    """A queue of keys with a hand; a `Policy`."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._oldest: _Node | None = None
        self._newest: _Node | None = None
        self._hand: _Node | None = None  # None: before the oldest

    def __repr__(self) -> str:
        return f"Sieve(keys={len(self._nodes)})"

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def arrived(self, key: str, *, used: bool = False) -> None:
        """Add a new key as the newest; one that was used already is spared once."""
        node = self._nodes[key] = _Node(key, used, older=self._newest)
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = node

    def used(self, key: str) -> None:
        """Mark a key as used."""
        self._nodes[key].visited = True

    def gone(self, key: str) -> None:
        """Remove a key, if it is in the queue."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if node is self._hand:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older

    def victims(self) -> Iterator[str]:
        """Yield the keys in eviction order; the queue must not change during the iteration.

        The hand moves to the first of them and stays there, so a second call yields the same order.
        """
        first = self._sweep()
        if first is None:
            return
        spared: list[str] = []
        for node in self._circle(first):
            if node.visited:
                spared.append(node.key)
            else:
                yield node.key
        yield from spared

    def _sweep(self) -> _Node | None:
        """Move the hand to the first key that was not used since the hand last passed it."""
        node = self._hand or self._oldest
        while node is not None and node.visited:
            node.visited = False
            node = node.newer or self._oldest
        self._hand = node
        return node

    def _circle(self, first: _Node) -> Iterator[_Node]:
        yield first
        node = first.newer or self._oldest
        while node is not None and node is not first:
            yield node
            node = node.newer or self._oldest
