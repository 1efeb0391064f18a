"""rounds.py: an endless sequence of rounds, each with every shard once, and the parts of it that epochs are."""

import hashlib
import json
import random
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.order.sequences.rounds import Order, Shuffle, permutation, round_key, shard_order
from support.cases import examples

counts_of_shards = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
shuffles = st.none() | st.builds(Shuffle, seed=st.integers(), groups=st.integers(1, 4))

Sample = tuple[int, int]


def samples_of(order: Order, start: int, stop: int, counts: list[int]) -> list[Sample]:
    """Return the samples between two positions, shuffled within shards: shard, and number in it."""
    return [
        (piece.shard, number)
        for piece in order.pieces(start, stop)
        for number in piece.numbers(counts[piece.shard], permuted=True)
    ]


@given(counts_of_shards, shuffles, st.data())
def test_any_interval_is_a_part_of_the_whole(counts: list[int], shuffle: Shuffle | None, data: st.DataObject) -> None:
    """An interval reads the same wherever it was cut, over the ends of rounds, too; a round has every sample once."""
    order, size = Order(counts, shuffle), sum(counts)
    start = data.draw(st.integers(0, 3 * size))
    stop = data.draw(st.integers(start, 3 * size))
    whole = samples_of(order, 0, 3 * size, counts)
    assert samples_of(order, start, stop, counts) == whole[start:stop]
    every = [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]
    assert all(sorted(whole[first : first + size]) == every for first in range(0, 3 * size, size))
    assert all(piece.start < (piece.stop or 0) for piece in order.pieces(start, stop)), "no piece is empty"


def test_dataset_without_samples_has_no_pieces() -> None:
    """An order without any sample has none anywhere, rather than no end."""
    assert not [*Order([0, 0], None).pieces(0, 10)]


def shards_in(number: int, shuffle: Shuffle, counts: list[int]) -> list[int]:
    """Return the shards of a round in order."""
    return list(shard_order(counts, shuffle, round_key(shuffle, number)))


def test_the_order_of_shards_is_pinned() -> None:
    """A run that goes on under another release, machine or Python finds the order that it began with."""
    assert shards_in(0, Shuffle(7), [1] * 12) == [3, 6, 5, 0, 7, 8, 1, 10, 2, 4, 9, 11]
    assert shards_in(1, Shuffle(7), [1] * 12) == [11, 2, 0, 6, 9, 5, 7, 4, 10, 3, 8, 1]
    assert shards_in(1, Shuffle(-8), [1] * 12) == [1, 0, 10, 8, 2, 9, 7, 11, 4, 3, 5, 6]
    assert shards_in(0, Shuffle(7, groups=2), [1] * 8) == [4, 3, 0, 6, 1, 2, 5, 7]
    assert shards_in(1, Shuffle(7, groups=2), [1] * 8) == [4, 3, 6, 0, 1, 7, 2, 5]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any), st.integers(1, 6), st.integers())
def test_groups_stay_the_same_and_are_equally_heavy(counts: list[int], groups: int, seed: int) -> None:
    """Where a group should end, or at most a shard from there, all rounds have met the same shards."""
    rounds = [shards_in(number, Shuffle(seed, groups=groups), counts) for number in range(4)]
    ends = [end for end in range(len(counts) + 1) if len({frozenset(order[:end]) for order in rounds}) == 1]
    weights = [sum(counts[shard] for shard in rounds[0][:end]) for end in ends]
    for group in range(1, groups):
        assert min(abs(weight - sum(counts) * group / groups) for weight in weights) <= max(counts)


@examples(40)
@given(st.integers(0, 3000), st.text(st.characters(codec="utf-8")))
def test_a_permutation_is_the_documented_one(size: int, key: str) -> None:
    """Sorted by random numbers, in whichever way: an epoch that was begun with another version goes on in its order."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    as_documented = [number for _, number in sorted((source.random(), number) for number in range(size))]
    assert [*permutation(size, key)] == as_documented


def test_a_permutation_needs_no_numpy() -> None:
    """Where numpy is missing, the order is the same."""
    script = """
import json, sys
sys.modules["numpy"] = None
from shardcache_client.order.sequences.rounds import permutation
print(json.dumps(permutation(3000, "7/0/5")))
"""
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == [*permutation(3000, "7/0/5")]
