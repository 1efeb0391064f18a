"""uncounted.py: the steps of epochs whose samples are not counted."""

from collections import Counter
from itertools import chain, islice

from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.order.dealing.deal import ShardDeal
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace, UncountedEpoch

shuffles = st.none() | st.builds(Shuffle, seed=st.integers(0, 99), window=st.integers(0, 4))
numbers = st.integers(1, 12)


def epochs_of(deal: ShardDeal, world_size: int, epoch: int) -> list[UncountedEpoch]:
    """Return the epoch of each rank."""
    return [UncountedEpoch(deal, Topology(rank, world_size), epoch) for rank in range(world_size)]


def shards_of(epoch: UncountedEpoch, share: int = 0) -> list[int]:
    """Return the shards of a share in the order in which they are needed."""
    return list(epoch.shards(StepPlace(share)))


@given(numbers, shuffles, numbers, st.integers(0, 3))
def test_each_shard_is_in_one_share(
    shards: int, shuffle: Shuffle | None, world_size: int, epoch: int
) -> None:
    """Of all ranks, some of which have none if there are more of them than shards."""
    ranks = epochs_of(ShardDeal(shards, shuffle), world_size, epoch)
    assert sorted(chain(*map(shards_of, ranks))) == list(range(shards))


@given(numbers, shuffles, numbers)
def test_reader_with_a_quota_meets_every_shard_in_its_shares(
    shards: int, shuffle: Shuffle | None, world_size: int
) -> None:
    """Every shard comes in `pass_shares` shares from any start, and one more has shards."""
    epoch = epochs_of(ShardDeal(shards, shuffle, samples_per_epoch=5), world_size, 0)[-1]
    for first in (0, 3):
        some = range(first, first + epoch.pass_shares)
        assert set(chain(*(shards_of(epoch, share) for share in some))) == set(range(shards))
        assert all(shards_of(epoch, share) for share in some)
    assert epoch.has_share(10**6)


@given(numbers, shuffles, numbers)
def test_shards_of_a_quota_come_equally_often(
    shards: int, shuffle: Shuffle | None, world_size: int
) -> None:
    """Each reader meets them in as many shares as there are readers, even with few shards."""
    for epoch in epochs_of(ShardDeal(shards, shuffle, samples_per_epoch=5), world_size, 0):
        counts = Counter(chain(*(shards_of(epoch, share) for share in range(world_size))))
        assert set(counts) == set(range(shards))
        assert max(counts.values()) - min(counts.values()) <= 1


def test_reader_without_a_quota_has_its_own_share_alone() -> None:
    """And no shards after it."""
    epoch = UncountedEpoch(ShardDeal(6), Topology(1, 2), 0)
    assert epoch.has_share(0)
    assert not epoch.has_share(1)
    assert list(epoch.shards_after(0)) == []


@given(numbers, shuffles, st.integers(0, 20))
def test_shards_from_a_step_on_are_those_that_are_held_there_and_the_later_ones(
    shards: int, shuffle: Shuffle | None, step: int
) -> None:
    """Of a reader that resumes in a step: none that have left the mix before."""
    epoch = UncountedEpoch(ShardDeal(shards, shuffle), Topology(), 2)
    mix = epoch.mix(0)
    step = min(step, mix.steps - 1)
    whole = shards_of(epoch)
    assert list(epoch.shards(StepPlace(0, step))) == whole[mix.pieces_at(step).start :]


@given(numbers, shuffles)
def test_shards_after_a_share_are_those_of_the_following_shares(
    shards: int, shuffle: Shuffle | None
) -> None:
    """Endlessly, in their order."""
    epoch = UncountedEpoch(ShardDeal(shards, shuffle, samples_per_epoch=5), Topology(0, 2), 0)
    following = list(chain(*(shards_of(epoch, share) for share in (2, 3, 4))))
    assert list(islice(epoch.shards_after(1), len(following))) == following


def test_samples_are_mixed_if_they_are_shuffled_with_a_window() -> None:
    """With a window of 0, those of a shard stay in file order."""
    mixed = {
        window: UncountedEpoch(ShardDeal(3, Shuffle(window=window)), Topology(), 0).is_mixed
        for window in (0, 1, 8)
    }
    assert mixed == {0: False, 1: True, 8: True}
    assert not UncountedEpoch(ShardDeal(3), Topology(), 0).is_mixed
