"""order.py: every shard has exactly one reader, and the order is the same everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardcache.protocol import ShardRef
from shardcache_client.order import Plan, epoch_order, plan_reading, rank_share, reader_share
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
    for indices, number in ((plan.order[: plan.reads], epoch), (plan.order[plan.reads :], epoch + 1)):
        share = reader_share(epoch_order(shards, seed=seed, epoch=number), reader)
        assert [plan.shards[index] for index in indices] == [manifest[position] for position in share]
    assert set(plan.order) == set(range(len(plan.shards)))


def told(messages: Iterable[tuple[str, dict[str, Any]]]) -> list[list[Any]]:
    """Put a plan together again as the daemon does: the rows of its shards, in reading order."""
    shards: list[Any] = []
    order: list[int] = []
    for number, (kind, fields) in enumerate(messages):
        assert kind == ("extend" if number else "plan")
        assert len(fields["order"]) <= (4_000 if number else 1_000)
        shards += fields["shards"]
        order += fields["order"]
        assert all(0 <= index < len(shards) for index in order), "a position's shard comes with it at the latest"
    return [shards[index] for index in order]


@given(st.integers(1, 12_000), seeds, st.integers(0, 2_000))
def test_a_plan_told_in_pieces_is_the_plan(shards: int, seed: int | None, start: int) -> None:
    """However long it is and wherever it begins, the pieces make up the same reading order, each shard told once."""
    manifest = [ShardRef(f"s3://bucket/{number}.tar") for number in range(shards)]
    plan = plan_reading(manifest, seed=seed, epoch=3, topology=Topology())
    start = min(start, plan.reads)
    messages = list(plan.messages(start))
    assert told(messages) == [plan.shard(position).to_json() for position in range(start, len(plan.order))]
    assert sum(len(fields["shards"]) for _, fields in messages) == len(set(plan.order[start:]))
    assert messages[0][1]["epoch"] == 3
    assert messages[0][1]["reads"] == plan.reads - start


def test_a_plan_declared_again_leaves_out_what_was_read() -> None:
    """After two shards the message begins with the third, and still tells the whole next epoch."""
    manifest = [ShardRef(f"s3://bucket/{number}.tar", "v", 10, 3) for number in range(4)]
    ((kind, fields),) = plan_reading(manifest, seed=None, epoch=5, topology=Topology()).messages(start=2)
    assert (kind, fields["epoch"], fields["reads"]) == ("plan", 5, 2)
    assert fields["order"] == [0, 1, 2, 3, 0, 1]
    assert [row[0] for row in fields["shards"]] == [f"s3://bucket/{number}.tar" for number in (2, 3, 0, 1)]
    assert fields["shards"][0] == ["s3://bucket/2.tar", "v", 10, 3]


def test_the_first_message_of_a_long_plan_is_short() -> None:
    """A plan of a million positions begins with the thousand that come first, and only their shards are named."""
    shards = tuple(ShardRef(f"s3://bucket/{number}.tar") for number in range(500_000))
    messages = Plan(0, shards, (*range(500_000), *reversed(range(500_000))), reads=500_000).messages()
    _, first = next(messages)
    assert first["order"] == list(range(1_000))
    assert len(first["shards"]) == 1_000
    _, second = next(messages)
    assert second["order"] == list(range(1_000, 5_000))
    assert len(second["shards"]) == 4_000
    assert sum(len(fields["order"]) for _, fields in messages) == 1_000_000 - 5_000
