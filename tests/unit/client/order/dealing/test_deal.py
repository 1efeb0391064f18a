"""Order of reading: every sample once, ranks equal, another order each epoch, any topology."""

import hashlib
import json
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SampleDeal, ShardDeal
from shardcache_client.order.dealing.deal_options import DealOptions, check_even
from shardcache_client.order.sequences.partition import Partition, Phase
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace, UncountedEpoch
from support.shards.dealt import Dealt, Place, datasets, mixtures, shares

# Up to 300 ranks; mostly few, for there are samples enough to count.
sizes = st.integers(1, 12) | st.integers(1, 300)
cuts = st.builds(
    lambda size, even, batch_size: Partition(size, even, batch_size),
    sizes,
    st.sampled_from(["pad", "drop", None]),
    st.integers(1, 9),
)


def everybody(counts: list[int], shuffle: Shuffle, epoch: int, cut: Partition) -> list[list[Place]]:
    """Return for each reader of a job what it reads of an epoch of a dataset, in order."""
    return shares(SampleDeal(counts, shuffle, cut.even, cut.batch_size), counts, epoch, cut)


def check_epoch(read: list[list[Place]], cut: Partition, due: Counter[Place]) -> None:
    """Every sample once, ranks equal, and no more padding or dropping than was said."""
    count = Counter(chain.from_iterable(read))
    samples = due.total()
    totals = [len(places) for places in read]
    assert totals == [cut.size(samples, rank) for rank in range(cut.world_size)]
    assert max(totals) - min(totals) <= (1 if cut.even is None else 0)
    # As many as DistributedSampler would repeat or leave out.
    more = {"pad": -samples % cut.world_size, "drop": -(samples % cut.world_size), None: 0}[
        cut.even
    ]
    assert count.total() == samples + more
    assert count <= due if cut.even == "drop" else count >= due
    assert count.keys() <= due.keys()


@pytest.mark.slow
@given(
    datasets() | mixtures(),
    st.lists(cuts, min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 10**6),
)
def test_every_sample_once_whatever_the_topology(
    dealt: Dealt, cuts: list[Partition], epoch: int, step: int
) -> None:
    """Nothing is lost or repeated with many readers, empty shards or few samples.

    From whatever step, mixed or not, and again and again, other readers read what is left of the
    epoch.
    """
    due = dealt.epoch(epoch)
    phases: list[Phase] = []
    for cut in cuts:
        read = shares(dealt.deal(cut.even, cut.batch_size), dealt.shards, epoch, cut, phases)
        check_epoch(read, cut, due)
        taken = tuple(step * (reader + 7) % (len(places) + 1) for reader, places in enumerate(read))
        own = [
            stop - start
            for start, stop in (
                cut.owned_span(due.total(), reader) for reader in range(cut.world_size)
            )
        ]
        for places, *ends in zip(read, taken, own, strict=True):
            due -= Counter(places[: min(ends)])  # what is behind its own is padding
        phases.append(Phase(cut, taken))


def test_two_epochs_differ_and_one_repeats() -> None:
    """Shards and samples have another order in each epoch, fixed by the seed."""
    counts = [30] * 10
    cut = Partition(4)
    read = [everybody(counts, Shuffle(seed=3), epoch, cut) for epoch in (0, 1, 0)]
    assert read[0] == read[2] != read[1]
    assert everybody(counts, Shuffle(seed=4), 0, cut) != read[0]


def test_the_order_is_pinned() -> None:
    """Every process has this order, whatever its hash seed, and so have later releases."""
    read = everybody([7, 0, 31, 12, 5], Shuffle(11, 3, 2), 5, Partition(4, "pad", 4))
    assert hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16] == "07f9833ea21b8586"


def test_nodes_keep_their_shards() -> None:
    """A node meets almost only shards of its own with as many canonical nodes as nodes."""
    counts = [40 + shard % 7 for shard in range(64)]
    cut = Partition(4)
    grouped = Shuffle(seed=1, groups=4)
    free = Shuffle(seed=1)
    met = [
        [{shard for shard, _ in reader} for reader in everybody(counts, grouped, epoch, cut)]
        for epoch in range(5)
    ]
    for node in range(4):
        always = set.intersection(*(met[epoch][node] for epoch in range(5)))
        ever = set.union(*(met[epoch][node] for epoch in range(5)))
        assert len(always) >= 13
        assert len(ever) <= 26  # all of its group's, and in each epoch at most one at either border
    first_reader = [everybody(counts, free, epoch, cut)[0] for epoch in range(5)]
    assert len({shard for places in first_reader for shard, _ in places}) > 40


def test_a_reader_needs_only_its_own_part_of_the_epoch() -> None:
    """A reader has at most one shard more than its samples fill, despite mixing."""
    for reader in everybody([100] * 32, Shuffle(seed=2), 0, Partition(8)):
        assert len({shard for shard, _ in reader}) <= 5


def test_whole_shards_go_to_one_reader_each() -> None:
    """The deal of shards whose samples are not counted; in another order each epoch."""
    deal = ShardDeal(10, Shuffle(seed=1))
    first, second = (
        [shards_of(deal, epoch, Topology(rank, 3)) for rank in range(3)] for epoch in range(2)
    )
    assert sorted(shard for share in first for shard in share) == list(range(10))
    assert first != second


def shards_of(deal: ShardDeal, epoch: int, reader: Topology) -> list[int]:
    """Return the shards that a reader reads, in order."""
    return list(UncountedEpoch(deal, reader, epoch).shards(StepPlace()))


def test_ranks_without_counts_are_refused_at_the_start() -> None:
    """Ranks are refused before they hang, unless something gives the number of samples."""
    ranks = Topology(0, 2)
    with pytest.raises(ConfigError, match="shardcache index"):
        check_even(ShardDeal(10), ranks)
    check_even(ShardDeal(10), Topology())
    check_even(ShardDeal(10, samples_per_epoch=100), ranks)
    check_even(ShardDeal(10, even=None), ranks)
    with pytest.raises(ConfigError, match="fewer samples"):
        check_even(SampleDeal([1], even="drop"), ranks)


def test_seeds_of_a_mixture_do_not_reseed_a_dataset() -> None:
    """A mixture's state is refused as of another dataset, without a KeyError."""
    drawn = DealOptions(Shuffle(seed=1))
    assert drawn.reseeded({"web": 5}) == drawn
    assert drawn.reseeded({"": 5}) == DealOptions(Shuffle(seed=5))
