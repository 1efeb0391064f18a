"""Which shards a reader reads in an epoch, and in which order. Pure: the same on every machine and Python.

One order of the whole manifest belongs to each (seed, epoch); every reader computes it alone and takes its share,
so that readers agree without a word between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.protocol import ShardRef
from shardcache_client.topology import Topology


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
        epoch: the epoch of `order`.
        shards: each shard of either epoch, once.
        order: indices into `shards` in reading order.
        next: the same for the epoch after.
    """

    epoch: int
    shards: tuple[ShardRef, ...]
    order: tuple[int, ...]
    next: tuple[int, ...]

    def shard(self, position: int) -> ShardRef:
        """Return the shard that is read at a position of this epoch."""
        return self.shards[self.order[position]]

    def message(self, start: int = 0) -> dict[str, Any]:
        """Return the fields of the `plan` message, without what was read before position `start`."""
        return {
            "epoch": self.epoch,
            "shards": [shard.to_json() for shard in self.shards],
            "order": list(self.order[start:]),
            "next": list(self.next),
        }


def plan_reading(manifest: Sequence[ShardRef], *, seed: int | None, epoch: int, topology: Topology) -> Plan:
    """Return the plan of one reader for an epoch and the one after, which is as certain."""
    shares = [reader_share(epoch_order(len(manifest), seed=seed, epoch=each), topology) for each in (epoch, epoch + 1)]
    index = {position: i for i, position in enumerate(sorted({*shares[0], *shares[1]}))}

    def indices(share: Iterable[int]) -> tuple[int, ...]:
        return tuple(index[position] for position in share)

    return Plan(epoch, tuple(manifest[position] for position in index), indices(shares[0]), indices(shares[1]))
