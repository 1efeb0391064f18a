"""permutations.py: the order of shards and samples, determined by a key."""

import hashlib
import json
import random
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.order.sequences.permutations import (
    Shuffle,
    permutation,
    round_key,
    shard_order,
)
from support.cases import examples


def shards_in(number: int, shuffle: Shuffle, counts: list[int]) -> list[int]:
    """Return the shards of a round in order."""
    return list(shard_order(counts, shuffle, round_key(shuffle, number)))


def test_the_order_of_shards_is_pinned() -> None:
    """A run keeps its order under another release, machine or Python."""
    assert shards_in(0, Shuffle(7), [1] * 12) == [3, 6, 5, 0, 7, 8, 1, 10, 2, 4, 9, 11]
    assert shards_in(1, Shuffle(7), [1] * 12) == [11, 2, 0, 6, 9, 5, 7, 4, 10, 3, 8, 1]
    assert shards_in(1, Shuffle(-8), [1] * 12) == [1, 0, 10, 8, 2, 9, 7, 11, 4, 3, 5, 6]
    assert shards_in(0, Shuffle(7, groups=2), [1] * 8) == [4, 3, 0, 6, 1, 2, 5, 7]
    assert shards_in(1, Shuffle(7, groups=2), [1] * 8) == [4, 3, 6, 0, 1, 7, 2, 5]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any),
    st.integers(1, 6),
    st.integers(),
)
def test_groups_stay_the_same_and_are_equally_heavy(
    counts: list[int], groups: int, seed: int
) -> None:
    """All rounds have met the same shards at each group's end, or a shard from there."""
    rounds = [shards_in(number, Shuffle(seed, groups=groups), counts) for number in range(4)]
    ends = [
        end
        for end in range(len(counts) + 1)
        if len({frozenset(order[:end]) for order in rounds}) == 1
    ]
    weights = [sum(counts[shard] for shard in rounds[0][:end]) for end in ends]
    for group in range(1, groups):
        assert min(abs(weight - sum(counts) * group / groups) for weight in weights) <= max(counts)


@examples(40)
@given(st.integers(0, 3000), st.text(st.characters(codec="utf-8")))
def test_a_permutation_is_the_documented_one(size: int, key: str) -> None:
    """A sort by random numbers is the order; an epoch keeps it under another version."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    source = random.Random(int.from_bytes(digest, "little"))
    as_documented = [
        number for _, number in sorted((source.random(), number) for number in range(size))
    ]
    assert [*permutation(size, key)] == as_documented


def test_a_permutation_needs_no_numpy() -> None:
    """The order is the same without numpy."""
    script = """
import json, sys
sys.modules["numpy"] = None
from shardcache_client.order.sequences.permutations import permutation
print(json.dumps(permutation(3000, "7/0/5")))
"""
    output = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout
    assert json.loads(output) == [*permutation(3000, "7/0/5")]
