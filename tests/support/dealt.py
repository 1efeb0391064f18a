"""What readers would read of a deal, worked out without any shard."""

from __future__ import annotations

from collections.abc import Sequence

from shardcache_client.order.deal import SampleDeal
from shardcache_client.order.partition import Cut
from shardcache_client.order.progress import Phase
from shardcache_client.order.share import Segment, Share
from shardcache_client.topology import Topology

Place = tuple[int, int]
"""A shard, and the number of a sample in it."""


def walk(share: Share, counts: Sequence[int]) -> list[Place]:
    """Return the samples of a share in the order in which a reader gives them."""
    return [place for segment in share.segments for place in _walk_leg(segment, counts)]


def _walk_leg(segment: Segment, counts: Sequence[int]) -> list[Place]:
    mix, places = segment.mix, []
    for beat, first, last in segment.beats():
        pieces = mix.in_hand(beat)
        parts = []
        for piece in pieces:
            held = mix.pieces[piece]
            numbers = held.numbers(counts[held.shard], permuted=mix.window > 0)
            parts.append(iter(mix.part(piece, beat, numbers)))
        sizes = [part.__length_hint__() for part in parts]  # type: ignore[attr-defined]
        beat_places = [(mix.pieces[pieces[n]].shard, next(parts[n])) for n in mix.interleaved(beat, sizes)]
        places += beat_places[first:last]
    return places


def crew(cut: Cut) -> list[Topology]:
    """Return all readers of a job."""
    return [
        Topology(rank, cut.world_size, worker, cut.workers)
        for rank in range(cut.world_size)
        for worker in range(cut.workers)
    ]


def everybody(deal: SampleDeal, epoch: int, cut: Cut, phases: Sequence[Phase] = ()) -> list[list[Place]]:
    """Return for each reader of a job what it reads of an epoch, in order."""
    return [walk(deal.share(epoch, 0, reader, phases), deal.counts) for reader in crew(cut)]
