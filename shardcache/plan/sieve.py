"""Eviction order of the shards that are in no plan: SIEVE. Pure.

SIEVE is by Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU: an Efficient
Turn-Key Eviction Algorithm for Web Caches", NSDI 2024. It has a queue in order of arrival, and a
hand that moves from the oldest key to the newest. A key that was used after the hand last passed it
is spared once, and stays in its place. Any other key is evicted when the hand reaches it.

`Schedule` asks for victims here before it evicts planned shards.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain


class Sieve:
    """A queue of keys, divided in two by the hand.

    The queue holds only the keys of shards that may be evicted. A shard that is in use or planned
    counts as gone, and arrives again afterwards.
    """

    def __init__(self) -> None:
        # By key, True if the key was used after the hand last passed it.
        self._ahead: OrderedDict[str, bool] = OrderedDict()  # keys from the hand to the newest
        self._passed: OrderedDict[str, bool] = OrderedDict()  # keys from the oldest to the hand

    def __repr__(self) -> str:
        return f"Sieve(keys={len(self._ahead) + len(self._passed)})"

    def __contains__(self, key: str) -> bool:
        return key in self._ahead or key in self._passed

    def arrived(self, key: str, *, used: bool = False) -> None:
        """Add a new key as the newest.

        Args:
            key: the key.
            used: True if it was used already, so that it is spared once.
        """
        self._ahead[key] = used

    def used(self, key: str) -> None:
        """Mark a key, which is in the queue, as used."""
        keys = self._ahead if key in self._ahead else self._passed
        keys[key] = True

    def gone(self, key: str) -> None:
        """Remove a key, if it is in the queue."""
        self._ahead.pop(key, None)
        self._passed.pop(key, None)
        self._go_round()

    def victims(self) -> Iterator[str]:
        """Yield the keys in eviction order; the queue must not change during the iteration.

        The hand moves to the first key and stays there, so a second call yields the same order.
        """
        self._sweep()
        # In its first round, the hand spares the used keys. In its second, it evicts them in the
        # same order.
        spared: list[str] = []
        for key, used in chain(self._ahead.items(), self._passed.items()):
            if used:
                spared.append(key)
            else:
                yield key
        yield from spared

    def _sweep(self) -> None:
        """Move the hand to the next key that was not used after the hand last passed it.

        The hand goes round once at most, as it unmarks each key that it passes.
        """
        while self._ahead:
            key, used = next(iter(self._ahead.items()))
            if not used:
                return
            del self._ahead[key]
            self._passed[key] = False
            self._go_round()

    def _go_round(self) -> None:
        """Put the hand before the oldest key once it has passed the newest.

        So there is always a key ahead of the hand, unless the queue is empty.
        """
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead
