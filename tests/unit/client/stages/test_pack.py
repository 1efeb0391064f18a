"""The `pack` stage: equal blocks on all ranks, each sample once, resumed exactly."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError, SampleError
from shardcache_client.handlers import Handler, ignore_and_continue, reraise
from shardcache_client.order.topology import Topology
from shardcache_client.stages.pack import Block, Pack, numpy_block
from shardcache_client.stages.stage import Agree, EpochFacts, Mark, Placed
from support.cases import examples
from support.shards.packed import Meeting

MAX_TOKENS = 20
Given = list[tuple[list[int], Mark]]
"""The places of the samples of each block, with the mark after it."""


def stage(agreement: Callable[[Topology], Agree], window: int = 6, **options: Any) -> Pack:
    """Return the stage for items that are pairs of place and length."""
    settings: dict[str, Any] = {"on_error": reraise} | options
    return Pack(
        MAX_TOKENS,
        window,
        length=lambda item: item[1],
        tokens=None,
        block_of=numpy_block,
        agreement=agreement,
        **settings,
    )


def read(
    lengths: Sequence[int],
    start: Mark,
    seat: Callable[[int], int],
    reader: Topology,
    blocks: int | None = None,
    **options: Any,
) -> Given:
    """Return what one reader gives from a mark on; of at most so many blocks."""
    samples = (Placed(place, (place, lengths[place])) for place in range(start.place, len(lengths)))
    run = EpochFacts(reader, seed=7, epoch=0, start=start, places=len(lengths))
    regrouped = stage(lambda _: lambda _, value: seat(value), **options).regrouped(samples, run)
    return [
        ([place for place, _ in block["samples"]], mark)
        for block, mark in islice(regrouped, blocks)
    ]


def alone(lengths: Sequence[int], **options: Any) -> Given:
    """Return what a single rank gives."""
    return read(lengths, Mark(), int, Topology(), **options)


def together(
    ranks: Sequence[Sequence[int]], starts: Sequence[Mark] = (), blocks: int | None = None
) -> list[Given]:
    """Return what each of several ranks gives."""
    meeting = Meeting(len(ranks))

    def train(rank: int) -> Given:
        start = starts[rank] if starts else Mark()
        with meeting:
            return read(ranks[rank], start, meeting.seat(rank), Topology(rank, len(ranks)), blocks)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(train, range(len(ranks))))


lengths = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=30)
several = st.lists(lengths, min_size=2, max_size=3)


def blocks_of(given: Given) -> list[list[int]]:
    """Return the blocks without their marks."""
    return [block for block, _ in given]


@examples(100)
@given(several)
def test_ranks_give_equally_many_blocks(ranks: list[list[int]]) -> None:
    """Each of at most `max_tokens`, and none without samples."""
    given_by = together(ranks)

    assert len({len(given) for given in given_by}) == 1
    for given_blocks, rank in zip(given_by, ranks, strict=True):
        for block in blocks_of(given_blocks):
            assert 1 <= sum(rank[place] for place in block) <= MAX_TOKENS


@examples(100)
@given(several)
def test_only_the_last_sample_of_a_rank_is_repeated(ranks: list[list[int]]) -> None:
    """By itself, in blocks that only other ranks need; all others come once."""
    for given_blocks, rank in zip(together(ranks), ranks, strict=True):
        places = [place for block in blocks_of(given_blocks) for place in block]
        assert sorted(set(places)) == [*range(len(rank))]
        assert all(places.count(place) == 1 for place in range(len(rank) - 1))


@pytest.mark.slow
@examples(200)
@given(several, st.data())
def test_ranks_resume_with_the_very_next_block(ranks: list[list[int]], data: st.DataObject) -> None:
    """From the marks after any block, also where a rank has nothing left but what it repeats."""
    whole = together(ranks)
    taken = data.draw(st.integers(1, len(whole[0])))

    rest = together(ranks, [given_blocks[taken - 1][1] for given_blocks in whole])

    assert rest == [given_blocks[taken:] for given_blocks in whole]


@examples(100)
@given(several, st.data())
def test_marks_say_which_samples_are_left(ranks: list[list[int]], data: st.DataObject) -> None:
    """Samples left are those from its place on, without the bits beyond it."""
    whole = together(ranks)
    taken = data.draw(st.integers(1, len(whole[0])))

    for given_blocks, rank in zip(whole, ranks, strict=True):
        mark = given_blocks[taken - 1][1]
        seen = {place for block in blocks_of(given_blocks[:taken]) for place in block}
        left = {
            place
            for place in range(mark.place, len(rank))
            if not mark.beyond >> place - mark.place & 1
        }
        assert left == {*range(len(rank))} - seen


@given(lengths)
def test_single_rank_repeats_nothing(rank: list[int]) -> None:
    """Each sample is in one block, and the last mark is the end of the epoch."""
    given_blocks = alone(rank)

    assert sorted(place for block in blocks_of(given_blocks) for place in block) == [
        *range(len(rank))
    ]
    assert given_blocks[-1][1].place == len(rank)


@pytest.mark.parametrize("bad", [MAX_TOKENS + 1, 0, -3, float("nan"), "x", None])
def test_samples_that_fit_no_block_go_to_the_handler(bad: Any) -> None:
    """It raises, or leaves the sample out."""
    sizes = [5, bad, 7]
    with pytest.raises(SampleError, match="has length"):
        alone(sizes)
    assert blocks_of(alone(sizes, on_error=ignore_and_continue)) == [[0, 2]]


NO_TOKENS = [5, None, "abc", ["a"], [[1], [2, 3]], [[1, 2]], np.array(3), np.ones((2, 2)), {1: 2}]


@pytest.mark.parametrize("bad", NO_TOKENS)
def test_tokens_that_are_no_array_go_to_the_handler(bad: Any) -> None:
    """Like lengths that are none: it raises, or leaves the sample out."""
    found = {0: [1, 2], 1: bad, 2: np.arange(3)}

    def agreement(_reader: Topology) -> Agree:
        return lambda _, value: value

    def read_all(on_error: Handler) -> list[list[int]]:
        packing = Pack(MAX_TOKENS, 6, None, found.get, on_error, numpy_block, agreement)
        run = EpochFacts(Topology(), seed=7, epoch=0, start=Mark(), places=len(found))
        samples = (Placed(place, place) for place in found)
        return [block["tokens"].tolist() for block, _ in packing.regrouped(samples, run)]

    with pytest.raises(SampleError, match="tokens that are not numbers in one dimension"):
        read_all(reraise)
    assert read_all(ignore_and_continue) == [[1, 2, 0, 1, 2]]


def test_rank_without_samples_gets_an_error() -> None:
    """With nothing to repeat, it says how to deal samples."""
    with pytest.raises(ConfigError, match="no sample for a block"):
        together([[], [5] * 30])


def test_block_has_the_type_that_the_dataset_yields() -> None:
    """A dict of the samples and of arrays, which a training loop can move to a device as it is."""
    samples = iter([Placed(0, (0, 3)), Placed(1, (1, 2))])
    run = EpochFacts(Topology(), 7, 0, Mark(), 2)
    ((block, _),) = stage(lambda _: lambda _, value: value).regrouped(samples, run)
    found: Block[Any] = block
    assert found["samples"] == [(0, 3), (1, 2)]
    assert found["cu_seqlens"].tolist() == [0, 3, 5]
    assert found["positions"].tolist() == [0, 1, 2, 0, 1]
    assert found["max_seqlen"] == 3
    assert "tokens" not in found
