"""What a reader tells the daemon that it will read: the shards in the order in which it comes to them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.protocol import ShardRef

# Positions of a plan in its first message, and in each that follows.
_FIRST_PIECE = 1_000
_NEXT_PIECE = 4_000


@dataclass(frozen=True, slots=True)
class Plan:
    """What one reader will read, as it tells the daemon.

    Attributes:
        epoch: the epoch that is read now.
        shards: each shard of this epoch or the one after, once.
        order: indices into `shards` in reading order, through both epochs.
        reads: how many positions of `order` belong to this epoch.
    """

    epoch: int
    shards: tuple[ShardRef, ...]
    order: tuple[int, ...]
    reads: int

    def shard(self, position: int) -> ShardRef:
        """Return the shard that is read at a position."""
        return self.shards[self.order[position]]

    def messages(self, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that declare the plan, without what was read before position `start`.

        The first is a `plan`, any other an `extend` of it: (type, fields). A shard goes with the first position that
        needs it, so the daemon can begin with a short message, however long the plan is. Each is made when it is asked
        for.
        """
        numbers = array("q", [-1]) * len(self.shards)  # in the daemon's list, which the messages make up together
        known = 0
        for begin, end in _pieces(start, len(self.order)):
            indices = self.order[begin:end]
            new = [index for index in dict.fromkeys(indices) if numbers[index] < 0]
            for number, index in enumerate(new, known):
                numbers[index] = number
            known += len(new)
            fields = {
                "shards": [self.shards[index].to_json() for index in new],
                "order": [numbers[index] for index in indices],
            }
            if begin == start:
                yield "plan", {"epoch": self.epoch, "reads": self.reads - start, **fields}
            else:
                yield "extend", fields


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut `range(start, stop)` into a small piece, with which a daemon can begin, and larger ones; never into none."""
    end = min(start + _FIRST_PIECE, stop)
    yield start, end
    while end < stop:
        start, end = end, min(end + _NEXT_PIECE, stop)
        yield start, end


def plan_reading(manifest: Sequence[ShardRef], epoch: int, now: Sequence[int], after: Sequence[int]) -> Plan:
    """Return the plan to read these shards, by their numbers in the manifest, and those `after` them in the next epoch.

    Both are in the order in which the reader comes to them; the same shard may come several times.
    """
    numbers = [*now, *after]
    index = {number: i for i, number in enumerate(sorted(set(numbers)))}
    return Plan(
        epoch=epoch,
        shards=tuple(manifest[number] for number in index),
        order=tuple(index[number] for number in numbers),
        reads=len(now),
    )
