"""order.py: every shard has exactly one reader, and the order is the same everywhere."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardcache.protocol import ShardRef
from shardcache_client.order import epoch_order, plan_reading, rank_share, reader_share
from shardcache_client.topology import Topology

counts = st.integers(0, 200)
seeds = st.none() | st.integers()
epochs = st.integers(0, 10_000)


@given(counts, seeds, epochs, st.integers(1, 9), st.integers(1, 9))
def test_each_shard_has_exactly_one_reader(
    shards: int, seed: int | None, epoch: int, world_size: int, workers: int
) -> None:
    """The shares of all ranks and workers partition the manifest, whatever their numbers."""
    order = epoch_order(shards, seed=seed, epoch=epoch)
    readers = [Topology(rank, world_size, worker, workers) for rank in range(world_size) for worker in range(workers)]
    dealt = Counter(position for reader in readers for position in reader_share(order, reader))
    assert dealt == Counter(range(shards))


@given(counts, seeds, epochs, st.integers(1, 9), st.integers(1, 9))
def test_shares_differ_by_one_shard_at_most(
    shards: int, seed: int | None, epoch: int, world_size: int, workers: int
) -> None:
    """No rank, and no worker within its rank, has more than one shard more than another."""
    order = epoch_order(shards, seed=seed, epoch=epoch)
    ranks = [len(rank_share(order, rank, world_size)) for rank in range(world_size)]
    of_rank_0 = [len(reader_share(order, Topology(0, world_size, worker, workers))) for worker in range(workers)]
    assert max(ranks) - min(ranks) <= 1
    assert max(of_rank_0) - min(of_rank_0) <= 1
    assert sum(of_rank_0) == ranks[0]


def test_the_order_is_pinned() -> None:
    """A run that goes on under another release, machine or Python finds the order that it began with."""
    assert epoch_order(12, seed=7, epoch=0) == [5, 2, 7, 9, 3, 11, 4, 8, 0, 6, 10, 1]
    assert epoch_order(12, seed=7, epoch=1) == [2, 7, 5, 6, 3, 0, 11, 9, 1, 4, 10, 8]
    assert epoch_order(12, seed=-8, epoch=1) == [9, 8, 4, 5, 10, 2, 11, 3, 0, 1, 6, 7]


@given(st.integers(), epochs, st.integers(1, 3))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int, epoch: int, step: int) -> None:
    """Another epoch, or another seed, reads a hundred shards in another order."""
    order = epoch_order(100, seed=seed, epoch=epoch)
    assert epoch_order(100, seed=seed, epoch=epoch + step) != order
    assert epoch_order(100, seed=seed + step, epoch=epoch) != order


def test_shards_stay_in_place_without_shuffling() -> None:
    """Without a seed the manifest is read as it stands, in every epoch."""
    assert epoch_order(5, seed=None, epoch=0) == epoch_order(5, seed=None, epoch=9) == [0, 1, 2, 3, 4]


@given(counts, seeds, epochs, st.integers(1, 4), st.integers(1, 4))
def test_a_plan_names_what_its_reader_reads(
    shards: int, seed: int | None, epoch: int, world_size: int, workers: int
) -> None:
    """Both epochs of a plan lead to the reader's own share, and no other shard is in it."""
    manifest = [ShardRef(f"s3://bucket/{number}.tar") for number in range(shards)]
    reader = Topology(world_size - 1, world_size, workers - 1, workers)
    plan = plan_reading(manifest, seed=seed, epoch=epoch, topology=reader)
    for indices, number in ((plan.order, epoch), (plan.next, epoch + 1)):
        share = reader_share(epoch_order(shards, seed=seed, epoch=number), reader)
        assert [plan.shards[index] for index in indices] == [manifest[position] for position in share]
    assert {*plan.order, *plan.next} == set(range(len(plan.shards)))


def test_a_plan_declared_again_leaves_out_what_was_read() -> None:
    """After two shards the message begins with the third, and still tells the whole next epoch."""
    manifest = [ShardRef(f"s3://bucket/{number}.tar", "v", 10, 3) for number in range(4)]
    message = plan_reading(manifest, seed=None, epoch=5, topology=Topology()).message(start=2)
    assert (message["epoch"], message["order"], message["next"]) == (5, [2, 3], [0, 1, 2, 3])
    assert message["shards"][2] == ["s3://bucket/2.tar", "v", 10, 3]
