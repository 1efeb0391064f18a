"""Assignment of an epoch to readers, also when the readers change in the middle of it."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache_client.order.division import Partition, Phase, what_is_left

cuts = st.builds(
    Partition,
    world_size=st.integers(1, 64),
    workers=st.integers(1, 16),
    even=st.sampled_from(["pad", "drop", None]),
    batch_size=st.integers(1, 9),
)
epochs = st.integers(0, 3000)


def all_places(samples: int, phases: list[Phase], cut: Partition) -> list[list[int]]:
    """Return for each reader the places of the epoch that it reads, in order, if nobody mixes anything."""
    first = phases[0].cut if phases else cut
    starts = [first.own(samples, reader)[0] for reader in range(first.readers)]
    rest = what_is_left(samples, phases, cut)
    spans: list[list[int]] = []
    for reader in range(cut.readers):
        spans.append([])
        for span in cut.spans(len(rest), reader):
            for owner, start, stop in rest.between(*span):
                spans[-1] += range(starts[owner] + start, starts[owner] + stop)
    return spans


def dropped_or_padded(samples: int, cut: Partition) -> int:
    """Return the number of samples that DistributedSampler would repeat (positive) or leave out (negative)."""
    return {"pad": -samples % cut.world_size, "drop": -(samples % cut.world_size), None: 0}[cut.even]


def check_epoch(samples: int, spans: list[list[int]], cut: Partition, expected: set[int]) -> None:
    """Every expected place once, ranks equal, and no more padding or dropping than was said."""
    count = Counter(place for span in spans for place in span)
    ranks = [sum(map(len, spans[rank * cut.workers :][: cut.workers])) for rank in range(cut.world_size)]
    assert sum(ranks) == samples + (dropped_or_padded(samples, cut) if samples else 0)
    assert max(ranks) - min(ranks) <= (1 if cut.even is None else 0)
    if cut.even == "drop":
        assert set(count) <= expected
        assert max(count.values(), default=1) == 1
    else:
        assert set(count) == expected


@given(epochs, cuts)
def test_every_sample_once_and_ranks_equal(samples: int, cut: Partition) -> None:
    """For every number of samples, ranks and workers: one sample for 1024 readers, too."""
    spans = all_places(samples, [], cut)
    check_epoch(samples, spans, cut, set(range(samples)))
    assert [rank_size(spans, cut, rank) for rank in range(cut.world_size)] == [
        cut.rank_size(samples, rank) if samples else 0 for rank in range(cut.world_size)
    ]


def rank_size(spans: list[list[int]], cut: Partition, rank: int) -> int:
    """Return how many places a rank reads."""
    return sum(map(len, spans[rank * cut.workers :][: cut.workers]))


@given(st.integers(1, 500), cuts)
def test_workers_get_whole_batches(samples: int, cut: Partition) -> None:
    """So that only one batch of a rank is short, and a loader's length is right."""
    spans = all_places(samples, [], cut)
    for rank in range(cut.world_size):
        sizes = [len(span) for span in spans[rank * cut.workers :][: cut.workers]]
        batches = sum(-(-size // cut.batch_size) for size in sizes)
        assert batches == -(-sum(sizes) // cut.batch_size)


@settings(max_examples=60)
@given(epochs, st.lists(cuts, min_size=2, max_size=4), st.integers(0, 2**16))
def test_run_that_resumes_with_other_readers_sees_the_rest_once(
    samples: int, crews: list[Partition], step: int
) -> None:
    """From any step of any phase onto any other topology what is left is read once, whatever each reader had taken."""
    phases: list[Phase] = []
    left = set(range(samples))
    for cut in crews[:-1]:
        spans = all_places(samples, phases, cut)
        taken = tuple(step * (reader + 1) % (len(span) + 1) for reader, span in enumerate(spans))
        own = [stop - start for start, stop in (cut.own(len(left), reader) for reader in range(cut.readers))]
        left -= {place for each in zip(spans, taken, own, strict=True) for place in each[0][: min(each[1:])]}
        phases.append(Phase(cut, taken))
    check_epoch(len(left), all_places(samples, phases, crews[-1]), crews[-1], left)
