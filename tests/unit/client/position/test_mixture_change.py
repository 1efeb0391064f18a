"""mixture_change.py: a mixture that changes in mid-epoch, compared with lists of samples."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.mixture import MixedSource, MixtureDeal, MixtureOptions, weights_of
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.sequences.lanes import Share
from shardcache_client.order.sequences.mixes import Mix
from shardcache_client.order.sequences.partition import Even, Partition
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.rounds import Order
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.layouts import Grouping, MixtureLayout
from shardcache_client.order.topology import Topology
from shardcache_client.position.mixture_change import MixtureLoad
from shardcache_client.position.progress import Progress
from shardcache_client.position.rank_state import RankState
from shardcache_client.position.staged_state import Reached, StagedState
from shardcache_client.position.state import find_states
from shardcache_client.stages.stage import Mark
from support.cases import examples
from support.shards.dealt import source, walk

Sample = tuple[str, int, int]
"""Source, shard in the source, and number in the shard."""

POOL = {
    "a": source("a", [7, 0, 31, 12], Shuffle(11, 3)),
    "b": source("b", [5, 9]),
    "c": source("c", [4, 1, 6, 3, 8], Shuffle(2, 2, 2)),
    "d": source("d", [3], Shuffle(5, 0)),
}
GLOBAL = 12


@dataclass(frozen=True)
class Run:
    """A run of a mixture on ranks: the batches read before it ends or the next epoch begins."""

    weights: dict[str, int]
    samples: int
    ranks: int
    batches: tuple[int, ...]
    grouping: Grouping = "mixed"
    batch_size: int = 4
    even: Even = "pad"
    spans: int | None = None  # of global batches; None without these

    @property
    def sources(self) -> tuple[MixedSource, ...]:
        return tuple(POOL[name] for name in self.weights)

    @property
    def manifest(self) -> Manifest:
        return Manifest.concatenated([each.manifest for each in self.sources])

    @property
    def size(self) -> int:
        """Number of samples in a batch of each rank."""
        return self.batch_size if self.spans is None else GLOBAL // self.ranks

    def deal_options(self) -> MixtureOptions:
        return MixtureOptions(
            None,
            self.even,
            self.batch_size,
            self.samples,
            None if self.spans is None else GLOBAL,
            self.spans or 1,
            sources=self.sources,
            weights=weights_of(self.weights, self.sources),
            grouping=self.grouping,
        )

    def named(self, share: Share) -> list[Sample]:
        """Return the samples of a share, as a reader finds them by their places."""
        firsts = [
            (name, number) for name in self.weights for number in range(len(POOL[name].manifest))
        ]
        places = RankEpoch(share, self.manifest)
        return [(*firsts[shard], number) for shard, number in places.between(0, len(places))]


class Job:
    """A mixture on ranks that read in step, as it is read: from a state, and back to one."""

    def __init__(self, run: Run, state: str | None) -> None:
        self.run = run
        deal_options = run.deal_options()
        progress = Progress()
        self.is_changed = False
        if state is not None:
            states = find_states(json.loads(state))
            before = states[0].mixture
            assert before is not None
            load = MixtureLoad(states, deal_options, run.manifest, run.ranks)
            states = states if load.is_same else load.states_after_change()
            deal_options = deal_options.after(states[0].terms.change)
            self.is_changed = deal_options.change != before.change
            assert isinstance(states[0], RankState)
            progress = states[0].progress
            if states[0].over:
                progress = Progress(progress.epoch + 1)
        self.deal_options = deal_options
        deal = deal_options.deal(run.manifest)
        assert isinstance(deal, SpanDeal)
        self.dataset = deal_options.identities(run.manifest)[True]
        self.deal = deal.for_ranks(run.ranks)
        self.progress = progress
        self.over = False

    @property
    def starts_epoch(self) -> bool:
        """True if nothing was left of the epoch before, so that the change is at its end."""
        change = self.deal_options.change
        return change is not None and change.samples is None

    @property
    def layout(self) -> MixtureLayout:
        """Parts of each source that the epoch takes."""
        deal = self.deal.span_deal if isinstance(self.deal, ElasticDeal) else self.deal
        assert isinstance(deal, MixtureDeal)
        return deal.layout(self.progress.epoch)

    def left(self) -> list[list[Sample]]:
        """Return for each rank what it has left of the epoch."""
        found = []
        for rank in range(self.run.ranks):
            topology = Topology(rank, self.run.ranks)
            start = self.progress.start_of(self.deal, topology)
            share = self.deal.share(self.progress.epoch, topology, start.phases)
            found.append(self.run.named(share)[start.passed :])
        return found

    def take(self, batches: int) -> None:
        self.progress = self.progress.after(self.run.ranks, self.run.size, batches)

    def next_epoch(self) -> None:
        self.progress = Progress(self.progress.epoch + 1)

    def state(self, *, over: bool) -> str:
        mixture = self.deal.mixture_of(self.progress.epoch)
        return json.dumps(
            RankState(self.dataset, self.progress, over=over, mixture=mixture).to_json(),
            sort_keys=True,
        )


class Line:
    """A source as a list of samples: former epochs' rest, then rounds from a position on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.left: list[Sample] = []
        self.resumes = 0

    def between(self, start: int, stop: int) -> list[Sample]:
        """Return samples by how many come before them."""
        found = self.left[start:stop]
        begin = self.resumes + max(0, start - len(self.left))
        end = self.resumes + stop - len(self.left)
        return [*found, *self.mixed(begin, end)] if begin < end else found

    def mixed(self, begin: int, end: int) -> list[Sample]:
        """Return the samples between two positions in the rounds, as a reader mixes them."""
        of = POOL[self.name]
        counts = of.manifest.counts or []
        mix = Mix(
            Order(counts, of.shuffle).pieces(begin, end), of.shuffle.window if of.shuffle else 0
        )
        share = Share((mix.between(0, end - begin),), end - begin)
        return [(self.name, shard, number) for shard, number in walk(share, counts)]

    def move_on(self, samples: int) -> None:
        """Leave out the next samples."""
        self.resumes += max(0, samples - len(self.left))
        self.left = self.left[samples:]


class Lines:
    """A mixture of sources that are lists, place by place."""

    def __init__(self) -> None:
        self.lines = {name: Line(name) for name in POOL}
        self.rest: list[list[Sample]] | None = (
            None  # what each rank has left of an epoch that was begun
        )
        self.layout: MixtureLayout | None = None
        self.names: list[str] = []
        self.is_mixed = True
        self.taken: Counter[Sample] = Counter()
        self.dropped: Counter[Sample] = Counter()

    def span(self, layout: MixtureLayout, begin: int, end: int) -> list[Sample]:
        """Return the samples of a span of the epoch."""
        before = Counter(map(layout.turns.lane, range(begin)))
        counts = Counter(map(layout.turns.lane, range(begin, end)))
        draws = {
            lane: iter(self.lines[self.names[lane]].between(before[lane], before[lane] + count))
            for lane, count in counts.items()
        }
        return [next(draws[layout.turns.lane(place)]) for place in range(begin, end)]

    def shares(self, job: Job) -> list[list[Sample]]:
        """Return what each rank owns of the epoch, or of its rest."""
        ranks = job.run.ranks
        self.names = list(job.run.weights)
        self.is_mixed = job.run.grouping == "mixed"
        self.layout = job.layout
        if self.rest is not None:
            samples = [*chain.from_iterable(self.rest)]
            if len(self.rest) == ranks:
                return self.rest
            return [
                samples[slice(*Partition(ranks).owned_span(len(samples), rank))]
                for rank in range(ranks)
            ]
        cuts = [Partition(ranks).owned_span(job.layout.places, rank) for rank in range(ranks)]
        return [self.span(job.layout, *cut) if cut[0] < cut[1] else [] for cut in cuts]

    def end(self, left: Sequence[Sample] = ()) -> None:
        """End the epoch, of which some samples are left to come first."""
        assert self.layout is not None
        counts = Counter(map(self.layout.turns.lane, range(self.layout.places)))
        for lane, name in enumerate(self.names):
            line = self.lines[name]
            line.move_on(counts[lane])
            line.left = [sample for sample in left if sample[0] == name] + line.left
        self.rest = None

    def change(self, job: Job) -> None:
        """Have the rest of the epoch come first, unless the job drops it."""
        rest = [*chain.from_iterable(self.rest or ())]
        if not job.starts_epoch:
            if self.rest is not None:
                self.end(rest)
                # Others are rounded to whole batches.
                if self.is_mixed and job.run.grouping == "mixed":
                    assert job.layout.places == len(rest)
            return
        if self.rest is None:
            rest = self.unbegun()
        assert job.run.even == "drop" or not rest
        self.dropped.update(rest)
        self.end()

    def unbegun(self) -> list[Sample]:
        """Return the samples of the epoch, of which none were read."""
        assert self.layout is not None
        counts = Counter(map(self.layout.turns.lane, range(self.layout.places)))
        return [
            sample
            for lane, name in enumerate(self.names)
            for sample in self.lines[name].between(0, counts[lane])
        ]

    def check_nothing_is_lost(self) -> None:
        """Each source's first samples were taken or dropped, or are left, once for each round."""
        left = Counter(chain.from_iterable(self.rest or ()))
        for name, line in self.lines.items():
            resumes = line.resumes
            if self.rest is not None and self.layout is not None and name in self.names:
                lane = self.names.index(name)
                more = sum(
                    self.layout.turns.lane(place) == lane for place in range(self.layout.places)
                )
                left.update(line.left[more:])
                resumes += max(0, more - len(line.left))
            else:
                left.update(line.left)
            every = Counter(line.mixed(0, resumes)) if resumes else Counter()
            had = self.taken + self.dropped + left
            assert (
                Counter({sample: count for sample, count in had.items() if sample[0] == name})
                == every
            )


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


@pytest.mark.slow
def test_states_stay_small_however_often_a_mixture_changes() -> None:
    """Also if of one source, which is left out from the first change on, some is left for ever."""
    state: str | None = None
    sizes: list[int] = []
    for number in range(60):
        weights = {"a": 1 + number % 3, "b": 1} if number else {"a": 1, "c": 1}
        job = Job(Run(weights, 60, 2, (), batch_size=3), state)
        for _ in range(3):
            if not job.left()[0]:
                job.next_epoch()
            job.take(min(2, len(job.left()[0]) // 3))
        state = job.state(over=False)
        sizes.append(len(state))
    assert max(sizes) < 1200


def test_change_within_the_first_group_of_a_stage_is_in_states_that_can_be_loaded() -> None:
    """A single reader has then passed no samples but some beyond its place."""
    job = Job(Run({"a": 1, "b": 1}, 60, 1, ()), None)
    mixture = job.deal.mixture_of(0)
    reached = Reached(Mark(place=0, given=1, beyond=0b101))
    staged = StagedState(job.dataset, Progress(), 0, 1, 1, reached, mixture=mixture)
    changed = Run({"a": 3, "b": 1}, 60, 1, ())
    load = MixtureLoad([staged], changed.deal_options(), changed.manifest, changed.ranks)
    (state,) = load.states_after_change()
    data = json.loads(json.dumps(state.to_json()))
    (loaded,) = find_states(data)
    assert json.loads(json.dumps(loaded.to_json())) == data


@pytest.mark.parametrize(
    "spoilt",
    [
        {"mixed": [["a", "x"]]},
        {"mixed": [["z", "01234567"]]},
        {"batches": [2, 3, True, 60]},
        {"batches": [2, 3, 1, 60]},
        {"changed": {"epoch": 0, "samples": -1, "sources": []}},
        {"changed": {"epoch": 0, "samples": 5, "sources": [["a", "01234567"]]}},
        {"changed": {"epoch": 0, "samples": 5, "sources": [], "sections": [{"sources": []}]}},
        {"sources": {"a": {"start": 0}}},
    ],
)
def test_spoilt_states_are_refused(spoilt: dict[str, Any]) -> None:
    """They come from files that anyone may have written."""
    job = Job(Run({"a": 1, "b": 1}, 59, 1, ()), None)
    with pytest.raises(ConfigError, match="the state is invalid"):
        find_states(json.loads(job.state(over=False)) | spoilt)
