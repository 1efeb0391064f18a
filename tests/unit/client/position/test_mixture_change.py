"""mixture_change.py: a mixture that changes in mid-epoch, compared with lists of samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.sequences.partition import Even
from support.cases import examples
from support.shards.mixture_model import GLOBAL, Job, Lines, Run, Sample


def padded(own: list[Sample], every: list[list[Sample]], even: Even) -> list[Sample]:
    """Return what a rank reads of what all of them own."""
    if even is None:
        return own
    samples = [*chain.from_iterable(every)]
    size = len(samples) // len(every) if even == "drop" else -(-len(samples) // len(every))
    if even == "drop" or len(own) >= size:
        return own[:size]
    before = sum(map(len, every[: every.index(own) if own else 0]))
    return [*own, own[-1] if own else samples[before - 1]]


def check_run(job: Job, lines: Lines, batches: int, *, to_end: bool) -> None:
    """Read some batches or the rest of the epoch, and compare them with the lists'."""
    shares = lines.shares(job)
    size = job.run.size
    even = job.run.even
    found = job.left()
    if sum(map(len, shares)) >= len(shares):  # else some rank pads with what another one owns
        assert found == [padded(own, shares, even) for own in shares]
    most = min(map(len, shares)) // size
    if to_end:
        lines.taken.update(
            chain.from_iterable(
                share[: len(read)] for share, read in zip(shares, found, strict=True)
            )
        )
        lines.dropped.update(
            chain.from_iterable(
                share[len(read) :] for share, read in zip(shares, found, strict=True)
            )
        )
        lines.end()
        job.next_epoch()
        return
    taken = min(batches, most)
    job.take(taken)
    if taken:
        lines.taken.update(chain.from_iterable(share[: taken * size] for share in shares))
        lines.rest = [share[taken * size :] for share in shares]


weights = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1).filter(
    lambda each: any(each.values())
)
batches = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
evens = st.sampled_from(["pad", "drop", None])


def runs(**options: Any) -> st.SearchStrategy[list[Run]]:
    drawn = st.builds(Run, weights, st.integers(1, 90), st.integers(1, 4), batches, **options)
    same = st.tuples(drawn, st.integers(1, 4), batches).map(
        lambda each: replace(each[0], ranks=each[1])
    )
    return st.lists(drawn | same, min_size=1, max_size=6).map(_connected)


def _connected(drawn: list[Run]) -> list[Run]:
    """Return the runs with a source in common with those before them: others are refused."""
    known: set[str] = set()
    found = []
    for run in drawn:
        if known and not known & run.weights.keys():
            run = replace(run, weights=run.weights | {min(known): 1})
        known |= run.weights.keys()
        found.append(run)
    return found


def replay(runs: Sequence[Run]) -> Iterator[tuple[Job, Lines]]:
    """Read runs one after another, each from the last state, and yield each with the lists."""
    lines = Lines()
    state: str | None = None
    for run in runs:
        job = Job(run, state)
        if job.is_changed:
            lines.change(job)
        for number, batches in enumerate(run.batches):
            is_last = number == len(run.batches) - 1
            check_run(job, lines, batches, to_end=not is_last)
        lines.check_nothing_is_lost()
        yield job, lines
        state = job.state(over=False)


@examples(80)
@given(runs(even=evens, batch_size=st.integers(1, 5)))
def test_each_source_goes_on_where_it_was(runs: list[Run]) -> None:
    """Any changes, however often, leave each source's place: weights, samples, ranks, sizes."""
    for _ in replay(runs):
        pass


@pytest.mark.slow
@examples(60)
@given(
    runs(
        even=st.sampled_from(["pad", "drop"]),
        batch_size=st.integers(1, 5),
        grouping=st.sampled_from(["mixed", "source", "rank-source"]),
    )
)
def test_batches_of_one_source_go_on_where_they_were(runs: list[Run]) -> None:
    """Also on other ranks, in other batch sizes, and from mixed batches to these and back."""
    for job, _ in replay(runs):
        if job.run.grouping == "mixed":
            continue
        size = job.run.batch_size
        ranks = [[sample[0] for sample in share] for share in job.left()]
        steps = [
            [set(rank[first : first + size]) for rank in ranks]
            for first in range(0, len(ranks[0]), size)
        ]
        assert all(len(batch) == 1 for step in steps for batch in step)
        if job.run.grouping == "source":
            assert all(step == step[:1] * len(step) for step in steps)


def check_batches(job: Job, lines: Lines, batches: int, *, to_end: bool) -> None:
    """Read global batches or the rest of the epoch, and compare them with the lists'."""
    layout = job.layout
    lines.names = list(job.run.weights)
    lines.is_mixed = job.run.grouping == "mixed"
    lines.layout = layout
    assert job.run.spans is not None
    piece = GLOBAL // job.run.spans
    deal = job.deal
    assert isinstance(deal, ElasticDeal)
    number = deal.batches_in(job.progress.epoch)
    if not number:
        lines.end()
        job.next_epoch()
        lines.layout = job.layout
        return
    orders = [
        lines.span(layout, span * number * piece, (span + 1) * number * piece)
        for span in range(job.run.spans)
    ]
    first = job.progress.global_batches(deal)
    every = [
        [sample for order in orders for sample in order[batch * piece : (batch + 1) * piece]]
        for batch in range(first, number)
    ]
    ranks = job.left()
    size = job.run.size
    found = [
        [sample for rank in ranks for sample in rank[batch * size : (batch + 1) * size]]
        for batch in range(number - first)
    ]
    assert found == every
    if to_end:
        lines.end()
        job.next_epoch()
        return
    job.take(min(batches, number - first))
    passed = (first + min(batches, number - first)) * piece
    rests = [
        order[passed : max(passed, layout.places - nth * number * piece)]
        for nth, order in enumerate(orders)
    ]
    beyond = job.run.spans * number * piece
    tail = [lines.span(layout, beyond, layout.places)] if beyond < layout.places else []
    lines.rest = [*rests, *tail] if job.progress.phases else None


@pytest.mark.slow
@examples(60)
@given(
    st.sampled_from([1, 3]),
    st.sampled_from(["pad", "drop"]),
    runs(grouping=st.sampled_from(["mixed", "source"])),
)
def test_global_batches_go_on_where_they_were(spans: int, even: Even, runs: list[Run]) -> None:
    """On any number of ranks that divides them, the same batches come as on one."""
    lines = Lines()
    state: str | None = None
    for run in runs:
        job = Job(replace(run, spans=spans, even=even), state)
        if job.is_changed:
            lines.change(job)
        for number, batches in enumerate(run.batches):
            check_batches(job, lines, batches, to_end=number < len(run.batches) - 1)
        state = job.state(over=False)
