"""rank_epoch.py: places of a rank's epoch by number, and the visits of shards."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from shardcache.shared.protocol import ShardRef
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.sequences.lanes import Share
from shardcache_client.order.sequences.partition import Partition, Phase
from shardcache_client.order.sequences.permutations import window_of
from shardcache_client.order.shards.choices import Marked
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from support.shards.dealt import Dealt, datasets, mixtures, walk


def manifest_of(counts: Iterable[int]) -> Manifest:
    """Return a manifest of shards with so many samples."""
    return Manifest.of(
        ShardRef(f"{number}.tar", samples=count) for number, count in enumerate(counts)
    )


def dealt_to(share: Share, counts: list[int]) -> RankEpoch:
    """Return the epoch of a rank with this share."""
    return RankEpoch(share, manifest_of(counts))


class Given(NamedTuple):
    """A rank's share, the samples in each shard, and the shards of which no one is held."""

    share: Share
    counts: list[int]
    scattered: set[int]


@st.composite
def shares(draw: st.DrawFn) -> Given:
    """A rank's share of any deal, perhaps of the rest after other ranks' batches."""
    dealt: Dealt = draw(datasets(8, 20) | mixtures())
    deal: SpanDeal = dealt.deal(draw(st.sampled_from(["pad", "drop"])))
    if draw(st.booleans()):
        deal = ElasticDeal(deal, 12, draw(st.sampled_from([1, 2, 3])))
        ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
        earlier: list[Phase] = []  # they are never divided again
    else:
        ranks = draw(st.integers(1, 5))
        taken = (draw(st.integers(0, 30)),)
        earlier = [Phase(Partition(draw(st.integers(1, 4)), deal.even), taken)]
    topology = Topology(draw(st.integers(0, ranks - 1)), ranks)
    phases = earlier if draw(st.booleans()) else []
    scattered = {shard for some in deal.scattered for shard in some}
    return Given(deal.share(draw(st.integers(0, 2)), topology, phases), dealt.shards, scattered)


@given(shares(), st.data())
def test_any_places_are_those_of_reading_from_the_beginning(
    given: Given, data: st.DataObject
) -> None:
    """Of a dataset, a mixture or global batches; in any order of asking."""
    share, counts, _ = given
    whole = walk(share, counts)
    epoch = dealt_to(share, counts)
    assert len(epoch) == len(whole)
    for _ in range(4):
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole) + 3))
        assert epoch.between(start, stop) == whole[start:stop]


@given(shares(), st.data())
def test_runs_are_the_same_places(given: Given, data: st.DataObject) -> None:
    """Only samples that come in file order have runs."""
    share, counts, _ = given
    epoch = dealt_to(share, counts)
    start = data.draw(st.integers(0, len(epoch)))
    stop = data.draw(st.integers(start, len(epoch)))
    if epoch.has_runs:
        runs = epoch.runs(start, stop)
        found = [(run.shard, number) for run in runs for number in range(run.first, run.end)]
        assert found == epoch.between(start, stop)


@given(shares(), st.data())
def test_each_place_is_within_a_visit_of_its_shard(given: Given, data: st.DataObject) -> None:
    """From any place on; visits begin in order, and none of them is empty or over."""
    share, counts, scattered = given
    epoch = dealt_to(share, counts)
    start = data.draw(st.integers(0, len(epoch)))
    visits = list(epoch.visits(start))
    assert all(one.first <= other.first for one, other in pairwise(visits))
    assert all(max(start, visit.first) < visit.end for visit in visits)
    for number, place in enumerate(epoch.between(start, len(epoch)), start):
        if place[0] in scattered:
            continue  # read by itself
        assert any(visit.first <= number < visit.end for visit in visits if visit.shard == place[0])


@given(datasets(8, 20), st.integers(1, 4))
def test_a_rank_holds_a_window_of_shards(dealt: Dealt, ranks: int) -> None:
    """At no place more than `shuffle_window`, however its share was put together."""
    shuffle = dealt.shuffles[0]
    window = max(1, window_of(shuffle))
    epoch = dealt_to(dealt.deal().share(0, Topology(0, ranks)), dealt.shards)
    visits = list(epoch.visits())
    for number in range(len(epoch)):
        assert sum(visit.first <= number < visit.end for visit in visits) <= window


def test_places_of_a_selection_are_numbers_in_the_tar() -> None:
    """Those of the chosen samples."""
    chosen = manifest_of([4, 3]).select((Marked.of([0, 1, 0, 1]), None))
    share = Dealt([[2, 3]], [None]).deal().share(0, Topology())
    assert RankEpoch(share, chosen).between(0, 9) == [(0, 1), (0, 3), (1, 0), (1, 1), (1, 2)]


def test_an_endless_epoch_is_entered_anywhere() -> None:
    """Nothing is listed in advance."""
    dealt = Dealt([[7, 0, 5]], [None], samples=10**15)
    epoch = dealt_to(dealt.deal().share(0, Topology()), [7, 0, 5])
    last = 10**15 - 1
    assert epoch.between(last, 10**15) == [
        divmod(last % 12, 7) if last % 12 < 7 else (2, last % 12 - 7)
    ]
    assert next(epoch.visits(last)).end == 10**15
