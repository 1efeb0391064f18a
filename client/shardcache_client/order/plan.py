"""A reader's plan for the daemon: its shards in reading order. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.protocol import ShardRef

# Number of positions in a plan's first message, and in each that follows.
_FIRST_PIECE = 1_000
_NEXT_PIECE = 4_000


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards that one reader will read, as declared to the daemon.

    Attributes:
        epoch: the current epoch.
        shards: each shard of this epoch or the next, once.
        order: indices into `shards` in reading order, through both epochs.
        reads: number of positions of `order` that belong to this epoch.
    """

    epoch: int
    shards: tuple[ShardRef, ...]
    order: tuple[int, ...]
    reads: int

    def shard(self, position: int) -> ShardRef:
        """Return the shard at a position."""
        return self.shards[self.order[position]]

    def messages(self, start: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the messages that declare the plan from position `start` on, as (type, fields).

        The first is a `plan`, the others each an `extend` of it. A shard is sent with the first position that needs it,
        so the daemon can begin after one short message, however long the plan is. Messages are built lazily.
        """
        numbers = array("q", [-1]) * len(self.shards)  # indices into the list of shards sent so far
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
    """Cut `range(start, stop)` into a small first piece, for a quick start, and larger ones; at least one piece."""
    end = min(start + _FIRST_PIECE, stop)
    yield start, end
    while end < stop:
        start, end = end, min(end + _NEXT_PIECE, stop)
        yield start, end


def plan_reading(manifest: Sequence[ShardRef], epoch: int, now: Sequence[int], after: Sequence[int]) -> Plan:
    """Return the plan to read the shards `now` in this epoch and those `after` in the next.

    Shards are given by their numbers in the manifest, in reading order; a shard may come several times.
    """
    numbers = [*now, *after]
    index = {number: i for i, number in enumerate(sorted(set(numbers)))}
    return Plan(
        epoch=epoch,
        shards=tuple(manifest[number] for number in index),
        order=tuple(index[number] for number in numbers),
        reads=len(now),
    )
