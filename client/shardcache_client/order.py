"""Which shards a reader reads in an epoch, and in which order. Pure: the same on every machine and Python.

One order of the whole manifest belongs to each (seed, epoch); every reader computes it alone and takes its share,
so that readers agree without a word between them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.protocol import ShardRef
from shardcache_client.topology import Topology

# Positions of a plan in its first message, and in each that follows.
_FIRST_PIECE = 1_000
_NEXT_PIECE = 4_000


def epoch_order(shards: int, *, seed: int | None, epoch: int) -> list[int]:
    """Return the positions `range(shards)` in the order of this epoch; `seed` None keeps them as they are.

    Positions are sorted by a keyed hash (BLAKE2b, RFC 7693) of themselves: a permutation that depends on nothing
    but the three arguments, whereas `random` promises its `shuffle` for no later Python.
    """
    if seed is None:
        return list(range(shards))
    key = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=32).digest()
    return sorted(range(shards), key=lambda position: _rank_of(position, key))


def _rank_of(position: int, key: bytes) -> bytes:
    return hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=16).digest()


def rank_share(order: Sequence[int], rank: int, world_size: int) -> Sequence[int]:
    """Return what one rank reads: every `world_size`-th of the order."""
    return order[rank::world_size]


def reader_share(order: Sequence[int], topology: Topology) -> Sequence[int]:
    """Return what one worker of one rank reads: every `workers`-th of its rank's share."""
    return rank_share(order, topology.rank, topology.world_size)[topology.worker :: topology.workers]


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


def plan_reading(manifest: Sequence[ShardRef], *, seed: int | None, epoch: int, topology: Topology) -> Plan:
    """Return the plan of one reader for an epoch and the one after, which is as certain."""
    shares = [reader_share(epoch_order(len(manifest), seed=seed, epoch=each), topology) for each in (epoch, epoch + 1)]
    positions = [*shares[0], *shares[1]]
    index = {position: i for i, position in enumerate(sorted(set(positions)))}
    return Plan(
        epoch=epoch,
        shards=tuple(manifest[position] for position in index),
        order=tuple(index[position] for position in positions),
        reads=len(shares[0]),
    )
