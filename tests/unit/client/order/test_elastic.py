"""elastic.py: global batches for any number of ranks and workers, compared with batches cut from written-out spans."""

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.protocol import ShardRef
from shardcache_client.order.deal import Assignment, ElasticDeal, SampleDeal, SpanDeal
from shardcache_client.order.division import Even, Partition
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.mixture import MixedSource, MixtureDeal, SourceQuotas
from shardcache_client.order.rounds import Shuffle
from shardcache_client.position.state import Position, ReaderState, in_batches, resume_batches
from shardcache_client.topology import Topology
from support.shards.dealt import Place, crew, opened, walk

Batches = list[list[Place]]

shuffles = st.none() | st.builds(Shuffle, seed=st.integers(0, 5), window=st.integers(0, 4), groups=st.integers(1, 2))
manifests = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)
jobs = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 4))


@dataclass(frozen=True)
class Elastic:
    """A deal of global batches of 12 samples, and the reference for it."""

    spans: SpanDeal
    counts: list[int]
    count: int

    @property
    def deal(self) -> ElasticDeal:
        """The deal."""
        return ElasticDeal(self.spans, 12, self.count)

    def batches(self, epoch: int) -> Batches:
        """Return the global batches of an epoch, cut from the orders of its spans."""
        number, piece = self.deal.batches, 12 // self.count
        orders = [
            _walk_all(self.spans, epoch, (span * number * piece, (span + 1) * number * piece), self.counts)
            for span in range(self.count)
        ]
        return [
            [place for order in orders for place in order[batch * piece : (batch + 1) * piece]]
            for batch in range(number)
        ]

    def read(self, epoch: int, cut: Partition, taken: int = 0) -> Batches:
        """Return the global batches of a job, after so many: each rank takes batches from its workers in turn."""
        size = 12 // cut.world_size
        phases = in_batches([self.state(epoch, cut, taken)])[0].position.phases if taken else ()
        shares = [iter(walk(self.deal.share(epoch, 0, reader, phases), self.counts)) for reader in crew(cut)]
        batches: Batches = []
        for batch in range(self.deal.batches - taken):
            readers = [shares[rank * cut.workers + batch % cut.workers] for rank in range(cut.world_size)]
            batches.append([next(reader) for reader in readers for _ in range(size)])
        assert not any(list(reader) for reader in shares)
        return batches

    def state(self, epoch: int, cut: Partition, taken: int) -> ReaderState:
        """Return the state of a single reader after so many batches."""
        one = Partition(1, 1, cut.even, 12)
        return ReaderState("", Position(epoch, taken=12 * taken, given=12 * taken), one)


def _walk_all(spans: SpanDeal, epoch: int, span: tuple[int, int], counts: list[int]) -> list[Place]:
    from shardcache_client.order.lanes import Share

    whole = spans.lane(epoch, span).between(0, span[1] - span[0])
    return walk(Share((whole,), whole.samples), counts)


@st.composite
def elastics(draw: st.DrawFn) -> Elastic:
    """A dataset or a mixture of two."""
    even: Even = draw(st.sampled_from(["pad", "drop"]))
    count = draw(st.sampled_from([1, 2, 3, 4]))
    counts = [draw(manifests) for _ in range(draw(st.integers(1, 2)))]
    if len(counts) == 1:
        samples = draw(st.none() | st.integers(1, 90))
        return Elastic(SampleDeal(counts[0], draw(shuffles), even, 1, samples), counts[0], count)
    sources = tuple(
        MixedSource(name, Manifest.of(ShardRef(f"{name}/{n}", samples=each) for n, each in enumerate(numbers)), shuffle)
        for name, numbers, shuffle in zip("ab", counts, [draw(shuffles), draw(shuffles)], strict=True)
    )
    weights = {"a": draw(st.integers(1, 5)), "b": draw(st.integers(0, 5))}
    schedule = SourceQuotas.of(weights, sources, draw(st.integers(1, 90)))
    return Elastic(MixtureDeal(sources, schedule, even), [*counts[0], *counts[1]], count)


@settings(max_examples=150, deadline=None)
@given(elastics(), jobs, st.integers(0, 2))
def test_global_batches_are_the_same_for_any_job(elastic: Elastic, job: tuple[int, int], epoch: int) -> None:
    """Sample by sample, whatever the ranks and workers: those cut from the spans."""
    assert elastic.read(epoch, Partition(*job, elastic.deal.even)) == elastic.batches(epoch)


@settings(max_examples=100, deadline=None)
@given(elastics(), jobs, st.integers(0, 100))
def test_global_batches_resume_after_any_number(elastic: Elastic, job: tuple[int, int], taken: int) -> None:
    """With other ranks and workers, the rest is the rest of the sequence."""
    taken %= elastic.deal.batches + 1
    assert elastic.read(1, Partition(*job, elastic.deal.even), taken) == elastic.batches(1)[taken:]


@settings(max_examples=100, deadline=None)
@given(manifests, shuffles, st.sampled_from([1, 2, 3, 4]), st.sampled_from(["pad", "drop"]))
def test_global_batches_have_every_sample(counts: list[int], shuffle: Shuffle | None, count: int, even: Even) -> None:
    """Once, but for fewer than one batch, which are repeated to fill the last one, or left out."""
    elastic = Elastic(SampleDeal(counts, shuffle, even), counts, count)
    read = Counter(chain.from_iterable(elastic.batches(0)))
    every = {(shard, number) for shard, samples in enumerate(counts) for number in range(samples)}
    assert abs(read.total() - len(every)) < 12
    assert set(read) == every if even == "pad" else (read.total() == len(read) and set(read) <= every)


@settings(max_examples=150, deadline=None)
@given(elastics(), jobs, st.integers(0, 100))
def test_the_plan_of_global_batches_is_the_order_of_need(elastic: Elastic, job: tuple[int, int], taken: int) -> None:
    """For each reader: the shards in the order in which passing over their samples opens them."""
    for reader in crew(Partition(*job)):
        share = elastic.deal.share(0, 0, reader)
        rest = share.behind(min(taken, share.samples or 0))
        assert rest.shards() == [shard for part in rest.segments for shards, _ in opened(part) for shard in shards]


def state(reader: int, given: int, cut: Partition) -> ReaderState:
    """Return the state of a reader that has yielded so many samples."""
    return ReaderState("", Position(0, taken=given + 1, given=given), cut, reader=reader)


def test_states_are_counted_in_batches() -> None:
    """Of a rank's workers, which are in step with all others; samples that were skipped are no batches."""
    cut = Partition(2, 2, "pad", 6)
    states = [state(2, 18, cut), state(3, 12, cut)]
    start = resume_batches(in_batches(states), Partition(1, 1, "pad", 12), Topology())
    assert (start.taken, start.phases[0].taken) == (0, (18, 12))
    assert ElasticDeal(SampleDeal([120]), 12).share(0, 0, Topology(), start.phases).samples == 120 - 5 * 12
    assert resume_batches(states, cut, Topology(0, 2, 1, 2)) == Position(0, taken=12, given=12)
    with pytest.raises(ConfigError, match="some workers are missing"):
        in_batches(states[:1])


def test_state_within_a_batch_resumes_with_the_next_sample_or_with_the_batch() -> None:
    """The same readers read on where they were; others begin the batch again."""
    cut = Partition(1, 1, "pad", 12)
    states = in_batches([state(0, 30, cut)])
    assert resume_batches(states, cut, Topology()).given == 30
    others = resume_batches(states, Partition(2, 1, "pad", 6), Topology(1, 2))
    assert ElasticDeal(SampleDeal([120]), 12).share(0, 0, Topology(1, 2), others.phases).samples == 48


def test_ranks_that_do_not_divide_a_global_batch_are_refused() -> None:
    """They would not get equal parts."""
    with pytest.raises(ConfigError, match="divided among 5 ranks"):
        ElasticDeal(SampleDeal([120]), 12).share(0, 0, Topology(0, 5))


def test_global_batches_need_counts() -> None:
    """The error says how to count."""
    with pytest.raises(ConfigError) as caught:
        Assignment(global_batch_size=12).deal(Manifest.of([ShardRef("a")]))
    assert "shardcache index" in str(caught.value.remedy)
