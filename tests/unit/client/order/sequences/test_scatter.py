"""scatter.py: a permutation of all samples, of which any place is found by itself."""

import math
from collections import Counter
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.scatter import Bijection, ScatteredOrder

GLOBAL = None  # as a window


@given(st.integers(1, 1_000), st.text(max_size=5))
def test_bijection_has_each_number_once(size: int, key: str) -> None:
    """For any number of samples and any key."""
    assert sorted(Bijection(size, key).between(0, size)) == list(range(size))


@given(st.integers(1, 2**62), st.text(max_size=5), st.data())
def test_any_part_of_a_bijection_is_found_by_itself(
    size: int, key: str, data: st.DataObject
) -> None:
    """A part is the same one by one or in a row by numpy, of more samples than a list holds."""
    bijection = Bijection(size, key)
    start = data.draw(st.integers(0, size - 1))
    stop = min(size, start + 50)
    row = list(bijection.between(start, stop))
    assert row == [number for at in range(start, stop) for number in bijection.between(at, at + 1)]
    assert all(0 <= number < size for number in row)


def test_bijection_stays_the_same() -> None:
    """States of a release are read by the next one."""
    assert list(Bijection(20, "3/0").between(0, 20)) == [
        7,
        13,
        14,
        0,
        18,
        4,
        1,
        17,
        15,
        5,
        19,
        9,
        10,
        3,
        16,
        12,
        11,
        2,
        6,
        8,
    ]
    assert list(Bijection(10**12, "3/0").between(5, 8)) == [748344764278, 95300911718, 38656270352]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_order_of_few_samples_is_as_likely_as_any_other(size: int) -> None:
    """A chi-square test over 200 keys per order; the fixed sample makes it repeatable."""
    orders = list(permutations(range(size)))
    keys = 200 * len(orders)
    found = Counter(tuple(Bijection(size, f"{key}").between(0, size)) for key in range(keys))
    assert chi_square(found, cells=len(orders)) < limit(len(orders))


@pytest.mark.parametrize("size", [7, 12, 20])
def test_each_sample_is_as_likely_at_each_place_as_any_other(size: int) -> None:
    """So is each pair of samples at neighbouring places."""
    keys = 40 * size
    orders = [Bijection(size, f"{key}").between(0, size) for key in range(keys)]
    places = Counter((place, number) for order in orders for place, number in enumerate(order))
    steps = Counter(
        (after - before) % size for order in orders for before, after in pairwise(order)
    )

    assert chi_square(places, cells=size * size) < limit(size * size)
    assert chi_square(steps, cells=size - 1) < limit(size - 1)


def chi_square(found: Counter[Any], cells: int) -> float:
    """Return the statistic of counts that should be equal in so many cells."""
    expected = found.total() / cells
    missing = cells - len(found)
    return sum((count - expected) ** 2 for count in found.values()) / expected + missing * expected


def limit(cells: int) -> float:
    """Return the mean of the statistic and four of its standard deviations."""
    return cells + 4 * math.sqrt(2 * cells)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any), st.integers(-5, 5), st.data()
)
def test_each_round_has_every_sample_once(
    counts: list[int], seed: int, data: st.DataObject
) -> None:
    """And any stretch of the rounds is found by itself, empty shards or not."""
    order = ScatteredOrder(counts, Shuffle(seed, GLOBAL))
    every = [(shard, number) for shard, count in enumerate(counts) for number in range(count)]
    rounds = list(order.samples_between(0, 3 * order.samples))

    for number in range(3):
        assert sorted(rounds[number * order.samples : (number + 1) * order.samples]) == every
    start = data.draw(st.integers(0, len(rounds)))
    stop = data.draw(st.integers(start, len(rounds)))
    assert list(order.samples_between(start, stop)) == rounds[start:stop]


def test_rounds_and_seeds_have_orders_of_their_own() -> None:
    """The first two rounds of two seeds are four orders."""
    orders = [ScatteredOrder([500, 500], Shuffle(seed, GLOBAL)) for seed in (1, 2)]
    found = {
        tuple(order.samples_between(begin, begin + 1_000))
        for order in orders
        for begin in (0, 1_000)
    }
    assert len(found) == 4


def test_neighbours_of_a_shard_come_a_third_of_the_dataset_apart() -> None:
    """As in a permutation drawn at random."""
    order = ScatteredOrder([100] * 100, Shuffle(7, GLOBAL))
    at = {place: nth for nth, place in enumerate(order.samples_between(0, 10_000))}
    apart = [
        abs(at[shard, number] - at[shard, number + 1])
        for shard in range(100)
        for number in range(99)
    ]
    assert sum(apart) / len(apart) == pytest.approx(10_000 / 3, rel=0.03)
