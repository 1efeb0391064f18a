"""Samples of a deal, worked out without shards, and deals that Hypothesis draws."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st

from shardcache.shared.protocol import ShardRef
from shardcache_client.order.dealing.deal import SampleDeal, SpanDeal
from shardcache_client.order.mixture import MixedSource, MixtureDeal, weights_of
from shardcache_client.order.sequences.lanes import Chained, Interleaved, Part, Share, Strided
from shardcache_client.order.sequences.mixes import Segment
from shardcache_client.order.sequences.partition import Even, Partition, Phase
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.rounds import Order
from shardcache_client.order.sequences.scatter import Scattered, ScatteredOrder
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.quotas import Weights
from shardcache_client.order.topology import Topology

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
        return [passing[part.passed_before(number)] for number in range(part.samples)]
    if isinstance(part, Chained):
        return [place for each in part.parts() for place in _walk(each, counts)]
    if isinstance(part, Scattered):
        return list(part.samples_between(0, part.samples))
    assert isinstance(part, Interleaved)
    lanes = {lane: iter(_walk(lanes_part, counts)) for lane, lanes_part in part.parts().items()}
    places = [next(lanes[part.turns.lane(place)]) for place in range(part.start, part.stop)]
    assert not any(list(lane) for lane in lanes.values()), "all that a lane has comes in its turns"
    return places


def _walk_segment(segment: Segment, counts: Sequence[int]) -> list[Place]:
    mix = segment.mix
    places = []
    for step, first, last in steps_of(segment):
        pieces = mix.pieces_at(step)
        parts = []
        for piece in pieces:
            held = mix.pieces[piece]
            numbers = held.numbers(counts[held.shard], permuted=mix.window > 0)
            parts.append(iter(mix.part(piece, step, numbers)))
        sizes = [part.__length_hint__() for part in parts]  # type: ignore[attr-defined]
        step_places = [
            (mix.pieces[pieces[n]].shard, next(parts[n])) for n in mix.interleaved(step, sizes)
        ]
        places += step_places[first:last]
    return places


def steps_of(segment: Segment) -> Iterator[tuple[int, int, int | None]]:
    """Yield each step with the range of its samples to read; None as its end for all."""
    if segment.start == segment.stop:
        return
    begin, skipped = segment.mix.find(segment.start)
    end, last = segment.mix.find(segment.stop - 1)
    for step in range(begin, end + 1):
        yield step, skipped if step == begin else 0, last + 1 if step == end else None


def crew(cut: Partition) -> list[Topology]:
    return [Topology(rank, cut.world_size) for rank in range(cut.world_size)]


def shares(
    deal: SpanDeal, counts: Sequence[int], epoch: int, cut: Partition, phases: Sequence[Phase] = ()
) -> list[list[Place]]:
    """Return what each reader of a job reads of an epoch with so many samples in each shard."""
    return [walk(deal.share(epoch, reader, phases), counts) for reader in crew(cut)]


def source(name: str, counts: Sequence[int], shuffle: Shuffle | None = None) -> MixedSource:
    """Return a source whose shards have so many samples."""
    shards = (ShardRef(f"{name}/{number}", samples=count) for number, count in enumerate(counts))
    return MixedSource(name, Manifest.of(shards), shuffle)


@dataclass(frozen=True)
class Dealt:
    """A dataset or mixture, and its deal's reference: each source's samples in order.

    Attributes:
        counts, shuffles: of each source.
        weights: of a mixture's sources, in one epoch after another; the last ones stay. None for a
            dataset alone.
        samples: of an epoch; None for all of a dataset.
    """

    counts: list[list[int]]
    shuffles: list[Shuffle | None]
    weights: list[list[int]] | None = None
    samples: int | None = None

    def deal(self, even: Even = None, batch_size: int = 1) -> SpanDeal:
        if self.weights is None:
            return SampleDeal(self.counts[0], self.shuffles[0], even, batch_size, self.samples)
        sources = tuple(map(source, "abcd", self.counts, self.shuffles))
        by_epoch: Weights = {
            epoch: {each.name: weight for each, weight in zip(sources, weights, strict=True)}
            for epoch, weights in enumerate(self.weights)
        }
        return MixtureDeal(
            sources, weights_of(by_epoch, sources), self.samples or 0, even, batch_size
        )

    @property
    def shards(self) -> list[int]:
        """Number of samples in each shard of the manifest."""
        return list(chain.from_iterable(self.counts))

    def epoch(self, epoch: int) -> Counter[Place]:
        """Return the samples of an epoch: those that come next in each source."""
        deal = self.deal()
        if isinstance(deal, MixtureDeal):
            starts = deal.layout(epoch).starts
            stops = deal.layout(epoch + 1).starts
        else:
            starts = (epoch * deal.epoch_samples,)
            stops = ((epoch + 1) * deal.epoch_samples,)
        due: Counter[Place] = Counter()
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            due.update(self._endless(number, stop)[start:])
        return due

    def _endless(self, number: int, samples: int) -> list[Place]:
        first = sum(map(len, self.counts[:number]))
        counts = self.counts[number]
        shuffle = self.shuffles[number]
        if shuffle is not None and shuffle.is_global:
            return list(
                Scattered(0, samples, ScatteredOrder(counts, shuffle), 0, first).samples_between(
                    0, samples
                )
            )
        return [
            (first + piece.shard, sample)
            for piece in Order(counts, shuffle).pieces(0, samples)
            for sample in piece.numbers(
                counts[piece.shard], permuted=bool(shuffle and shuffle.window)
            )
        ]


def _shuffles(max_window: int, max_groups: int) -> st.SearchStrategy[Shuffle | None]:
    seeds = st.integers(-5, 2**70)
    windows = st.builds(Shuffle, seeds, st.integers(0, max_window), st.integers(1, max_groups))
    return st.none() | windows | st.builds(Shuffle, seeds, st.none())


def _manifests(max_shards: int, max_samples: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, max_samples), min_size=1, max_size=max_shards).filter(any)


@st.composite
def datasets(draw: st.DrawFn, max_shards: int = 20, max_samples: int = 50) -> Dealt:
    """A dataset, read as a whole in each epoch or in parts."""
    counts = draw(_manifests(max_shards, max_samples))
    shuffle = draw(_shuffles(9, 5))
    return Dealt([counts], [shuffle], samples=draw(st.none() | st.integers(1, 200)))


@st.composite
def mixtures(draw: st.DrawFn) -> Dealt:
    """Up to four sources of few samples, with weights that change over up to three epochs."""
    number = draw(st.integers(1, 4))
    weights = st.lists(st.integers(0, 9), min_size=number, max_size=number).filter(any)
    return Dealt(
        [draw(_manifests(6, 12)) for _ in range(number)],
        [draw(_shuffles(4, 2)) for _ in range(number)],
        draw(st.lists(weights, min_size=1, max_size=3)),
        draw(st.integers(1, 80)),
    )
