"""Mixtures that change in mid-epoch: jobs as they are read, and lists of samples to compare."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
from shardcache_client.position.state import find_states
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
            first = states[0] if load.is_same else load.states_after_change()[0]
            deal_options = deal_options.after(first.terms.change)
            self.is_changed = deal_options.change != before.change
            assert isinstance(first, RankState)
            progress = first.progress
            if first.over:
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
        window = 0
        if of.shuffle is not None and of.shuffle.window is not None:
            window = of.shuffle.window
        mix = Mix(Order(counts, of.shuffle).pieces(begin, end), window)
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
        # Samples that each rank has left of an epoch that was begun.
        self.rest: list[list[Sample]] | None = None
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
