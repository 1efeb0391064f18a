"""buckets.py: every sample once, padded sizes bounded, exactly as many batches as were wanted, and little padding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.lengths.buckets import batches, fewest


@st.composite
def buffers(draw: st.DrawFn, max_size: int = 60) -> tuple[list[int], int]:
    """Lengths, and a bound that the longest of them keeps to."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=max_size))
    return lengths, draw(st.integers(max(lengths), 200))


def padded(lengths: list[int], batch: list[int]) -> int:
    """Return a batch's size after padding."""
    return len(batch) * max(lengths[number] for number in batch)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to part items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in partitions(rest):
        yield [[first], *partition]
        for at, group in enumerate(partition):
            yield [*partition[:at], [first, *group], *partition[at + 1 :]]


@given(buffers(max_size=7))
def test_no_batches_of_any_shape_are_fewer(buffer: tuple[list[int], int]) -> None:
    """An exhaustive search over all groupings finds no fewer batches within the bound."""
    lengths, max_tokens = buffer
    fits = (
        len(groups)
        for groups in partitions(list(range(len(lengths))))
        if all(padded(lengths, group) <= max_tokens for group in groups)
    )
    assert fewest(lengths, max_tokens) == min(fits)


@given(buffers(), st.integers(0, 30))
def test_each_sample_is_in_one_batch_within_the_bound(buffer: tuple[list[int], int], more: int) -> None:
    """As many batches as wanted come out; together they are the samples, and none is larger than allowed."""
    lengths, max_tokens = buffer
    count = min(fewest(lengths, max_tokens) + more, len(lengths))
    given_out = batches(lengths, max_tokens, count)
    assert len(given_out) == count
    assert all(padded(lengths, batch) <= max_tokens for batch in given_out)
    assert sorted(chain.from_iterable(given_out)) == list(range(len(lengths)))


@given(buffers(), st.integers(1, 30))
def test_more_batches_than_samples_repeat_the_shortest(buffer: tuple[list[int], int], more: int) -> None:
    """Beyond one batch for each sample there is the shortest alone, and nothing else, again and again."""
    lengths, max_tokens = buffer
    given_out = batches(lengths, max_tokens, len(lengths) + more)
    assert sorted(chain.from_iterable(given_out[: len(lengths)])) == list(range(len(lengths)))
    assert all(len(batch) == 1 and lengths[batch[0]] == min(lengths) for batch in given_out[len(lengths) :])
    assert len(given_out) == len(lengths) + more


@given(buffers())
def test_batches_go_from_long_to_short(buffer: tuple[list[int], int]) -> None:
    """The same number of a batch means like lengths on every rank: no sample is longer than one of a batch before."""
    lengths, max_tokens = buffer
    in_order = [
        lengths[number] for batch in batches(lengths, max_tokens, fewest(lengths, max_tokens)) for number in batch
    ]
    assert in_order == sorted(lengths, reverse=True)


def test_the_work_is_spread_over_all_batches() -> None:
    """Asked for one batch more than needed, no batch is left full beside a nearly empty one."""
    assert [len(batch) for batch in batches([10] * 100, 500, 2)] == [50, 50]
    assert [len(batch) for batch in batches([10] * 100, 500, 3)] == [34, 34, 32]
    assert [len(batch) for batch in batches([10] * 51, 500, 2)] == [26, 25]


def test_padding_is_next_to_nothing() -> None:
    """A thousand lengths, spread as those of speech are, need less than a tenth of the padding of unsorted batches."""
    draw = Random(7)
    lengths = [1 + min(int(draw.lognormvariate(6, 0.6)), 3_000) for _ in range(1_000)]
    bucketed = batches(lengths, 16_000, fewest(lengths, 16_000))
    as_they_come = [list(range(start, min(start + 16, 1_000))) for start in range(0, 1_000, 16)]
    shares = [1 - sum(lengths) / sum(padded(lengths, batch) for batch in each) for each in (bucketed, as_they_come)]
    assert shares[0] < shares[1] / 10
