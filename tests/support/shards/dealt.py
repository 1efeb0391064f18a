"""Samples that readers would read of a deal, worked out without any shard."""

from collections.abc import Iterator, Sequence

from shardcache_client.order.deal import SampleDeal, SpanDeal
from shardcache_client.order.division import Partition, Phase
from shardcache_client.order.lanes import Interleaved, Part, Segment, Share, Strided
from shardcache_client.topology import Topology

Place = tuple[int, int]
"""A shard, and the number of a sample in it."""


def walk(share: Share, counts: Sequence[int]) -> list[Place]:
    """Return the samples of a share in the order in which a reader gives them."""
    return [place for part in share.segments for place in _walk(part, counts)]


def _walk(part: Part, counts: Sequence[int]) -> list[Place]:
    if isinstance(part, Segment):
        return _walk_segment(part, counts)
    if isinstance(part, Strided):
        passing = _walk(part.passing(), counts)
        return [passing[place] for place in part.places()]
    assert isinstance(part, Interleaved)
    lanes = {lane: iter(_walk(lanes_part, counts)) for lane, lanes_part in part.parts().items()}
    places = [next(lanes[lane]) for lane in part.in_turn()]
    assert not any(list(lane) for lane in lanes.values()), "all that a lane has comes in its turns"
    return places


def _walk_segment(segment: Segment, counts: Sequence[int]) -> list[Place]:
    mix, places = segment.mix, []
    for step, first, last in segment.steps():
        pieces = mix.pieces_at(step)
        parts = []
        for piece in pieces:
            held = mix.pieces[piece]
            numbers = held.numbers(counts[held.shard], permuted=mix.window > 0)
            parts.append(iter(mix.part(piece, step, numbers)))
        sizes = [part.__length_hint__() for part in parts]  # type: ignore[attr-defined]
        step_places = [(mix.pieces[pieces[n]].shard, next(parts[n])) for n in mix.interleaved(step, sizes)]
        places += step_places[first:last]
    return places


def crew(cut: Partition) -> list[Topology]:
    return [
        Topology(rank, cut.world_size, worker, cut.workers)
        for rank in range(cut.world_size)
        for worker in range(cut.workers)
    ]


def everybody(deal: SampleDeal, epoch: int, cut: Partition, phases: Sequence[Phase] = ()) -> list[list[Place]]:
    """Return for each reader of a job what it reads of an epoch, in order."""
    return shares(deal, deal.counts, epoch, cut, phases)


def shares(
    deal: SpanDeal, counts: Sequence[int], epoch: int, cut: Partition, phases: Sequence[Phase] = ()
) -> list[list[Place]]:
    """Return what each reader of a job reads of an epoch of any deal, with so many samples in each shard."""
    return [walk(deal.share(epoch, 0, reader, phases), counts) for reader in crew(cut)]


def taken_in_turns(sizes: Sequence[int], batch_size: int, batches: int) -> list[int]:
    """Return how much each worker of a rank has given, of so many samples, after so many batches of a DataLoader."""
    left = list(sizes)
    while batches > 0 and any(left):
        for worker in [worker for worker, size in enumerate(left) if size][:batches]:
            left[worker] -= min(left[worker], batch_size)
            batches -= 1
    return [size - rest for size, rest in zip(sizes, left, strict=True)]


def opened(part: Part) -> Iterator[tuple[list[int], bool]]:
    """Yield for each place that reading passes the shards that it opens, and whether its sample is read."""
    if isinstance(part, Segment):
        known: set[int] = set()
        for step, first, last in part.steps():
            held = part.mix.pieces_at(step)
            new = [piece for piece in held if piece not in known]
            known.update(new)
            size = sum(
                len(part.mix.part(piece, step, part.mix.pieces[piece].numbers(99, permuted=False))) for piece in held
            )
            for nth in range(size)[first:last]:
                yield [part.mix.pieces[piece].shard for piece in new] if nth == first else [], True
    elif isinstance(part, Interleaved):
        lanes = {lane: opened(each) for lane, each in part.parts().items()}
        for lane in part.in_turn():
            shards: list[int] = []
            for more, is_read in lanes[lane]:
                shards += more
                if is_read:
                    break
            yield shards, True
    else:
        assert isinstance(part, Strided)
        places = set(part.places())
        for place, (shards, _) in enumerate(opened(part.passing())):
            yield shards, place in places
