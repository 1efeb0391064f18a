"""progress.py: batch numbers tell exactly what was read, for any ranks, and fit a state."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache.shared.protocol import ShardRef
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.rank_epoch import RankEpoch
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.share_places import SampleId
from shardcache_client.order.topology import Topology
from shardcache_client.position.progress import BatchPhase, Progress
from support.cases import examples
from support.shards.dealt import Dealt, datasets, mixtures

DATASET = "0123456789abcdef"


@dataclass
class Job:
    """Ranks that read an epoch from a progress on, batch by batch."""

    deal: SpanDeal
    manifest: Manifest
    ranks: int
    progress: Progress

    def left(self, batch_size: int) -> int:
        """Return the number of batches that every rank has left."""
        places = [len(self.batch(rank, 10**6, 0)) for rank in range(self.ranks)]
        return min(-(-each // batch_size) for each in places)

    def batch(self, rank: int, batch_size: int, number: int) -> list[SampleId]:
        """Return the batch of this number, counted from where the job resumed."""
        topology = Topology(rank, self.ranks)
        start = self.progress.start_of(self.deal, topology)
        epoch = RankEpoch(
            self.deal.share(self.progress.epoch, topology, start.phases), self.manifest
        )
        first = start.passed + number * batch_size
        return epoch.between(first, first + batch_size)

    def read(self, batch_size: int, batches: int) -> list[list[SampleId]]:
        """Return for each rank the places of its next batches, and move on."""
        places = [
            [place for number in range(batches) for place in self.batch(rank, batch_size, number)]
            for rank in range(self.ranks)
        ]
        self.progress = self.progress.after(self.ranks, batch_size, batches)
        return places


def manifest_of(dealt: Dealt) -> Manifest:
    """Return the manifest of a dataset or mixture."""
    return Manifest.of(
        ShardRef(f"{number}.tar", samples=count) for number, count in enumerate(dealt.shards)
    )


jobs = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(0, 4)), min_size=1, max_size=6
)


@examples(80)
@given(datasets(8, 20) | mixtures(), st.sampled_from(["pad", "drop", None]), jobs)
def test_any_chain_of_jobs_reads_each_sample_once(
    dealt: Dealt, even: Even, jobs: list[tuple[int, int, int]]
) -> None:
    """Whatever their ranks and batch sizes; only the one that ends the epoch pads or drops."""
    deal = dealt.deal(even)
    manifest = manifest_of(dealt)
    due = dealt.epoch(0)
    progress = Progress()
    for ranks, batch_size, batches in jobs:
        job = Job(deal, manifest, ranks, progress)
        before = due.total()
        for places in job.read(batch_size, min(batches, job.left(batch_size))):
            due -= Counter(places)
        progress, _ = Progress.from_json(json.loads(json.dumps(job.progress.to_json(DATASET))))
        assert progress == job.progress
        assert before - due.total() <= ranks * batch_size * batches
    last = Job(deal, manifest, 3, progress)
    most = max(ranks for ranks, *_ in (*jobs, (3,)))
    rest = last.read(due.total() + 1, 1)
    read = sum(map(Counter, rest), Counter[SampleId]())
    assert len({len(places) for places in rest}) == 1 or even is None
    if even == "drop":
        assert read <= due
        assert due.total() - read.total() < most
    else:
        assert read >= due
        assert read.total() - due.total() < (3 if even == "pad" else 1)
    assert last.progress.is_over(deal, Topology(0, 3)) or not due


@pytest.mark.slow
@given(
    datasets(6, 12) | mixtures(),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 3))),
)
def test_global_batches_go_on_with_any_ranks(dealt: Dealt, jobs: list[tuple[int, int]]) -> None:
    """Each job reads the next ones that a single process would read."""
    deal = ElasticDeal(dealt.deal("pad"), 12, 3)
    manifest = manifest_of(dealt)
    progress = Progress()
    alone = Job(deal, manifest, 1, Progress())
    for ranks, batches in jobs:
        batches = min(batches, deal.batches_in(0) - progress.global_batches(deal))
        job = Job(deal, manifest, ranks, progress)
        parts = [
            [job.batch(rank, 12 // ranks, number) for rank in range(ranks)]
            for number in range(batches)
        ]
        together = [place for batch in parts for part in batch for place in part]
        job.read(12 // ranks, batches)
        assert [together] == alone.read(12, batches)
        progress = job.progress
    assert progress.is_over(deal, Topology()) == (
        progress.global_batches(deal) == deal.batches_in(0)
    )


@pytest.mark.slow
@given(
    datasets(8, 20),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4)), max_size=5),
)
def test_other_batch_sizes_read_on_in_the_same_order(
    dealt: Dealt, ranks: int, parts: list[tuple[int, int]]
) -> None:
    """A run in parts, each with batches of its own size, reads what one run would."""
    deal = dealt.deal()
    manifest = manifest_of(dealt)
    job = Job(deal, manifest, ranks, Progress())
    read: list[list[SampleId]] = [[] for _ in range(ranks)]
    for batch_size, batches in parts:
        for places, more in zip(read, job.read(batch_size, batches), strict=True):
            places += more
    whole = Job(deal, manifest, ranks, Progress()).read(
        sum(size * batches for size, batches in parts), 1
    )
    assert read == whole
    assert len(job.progress.phases) <= 1


def test_a_state_is_a_few_numbers() -> None:
    """Readable by a person, and below 300 bytes after many changes of ranks."""
    progress = Progress(3).after(8, 256, 1200).after(16, 128, 40)
    state = progress.to_json(DATASET)
    assert state == {
        "shardcache": 3,
        "dataset": DATASET,
        "epoch": 3,
        "phases": [[8, 256, 1200], [16, 128, 40]],
    }
    for ranks in range(10):
        progress = progress.after(1024 + ranks, 256, 1000)
    assert len(json.dumps(progress.to_json(DATASET))) < 300


def test_a_job_that_is_stopped_before_its_first_batch_changes_nothing() -> None:
    """Its ranks have taken no batch, so there is no phase to resume."""
    assert Progress(1).after(4, 32, 0) == Progress(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"shardcache": 2},
        {"shardcache": None},
        {"dataset": "x"},
        {"dataset": None},
        {"epoch": -1},
        {"epoch": True},
        {"epoch": 1 << 63},
        {"phases": [[1, 1]]},
        {"phases": [[0, 1, 1]]},
        {"phases": [[1, 1, "1"]]},
        {"phases": [[1, 1.5, 1]]},
        {"phases": 7},
        {"phases": {}},
        {"phases": [None]},
    ],
)
def test_invalid_state_is_refused(changes: dict[str, Any]) -> None:
    """With an error that says what to load."""
    state = Progress(1, (BatchPhase(2, 8, 3),)).to_json(DATASET)
    with pytest.raises(ConfigError, match="the state"):
        Progress.from_json(state | changes)
    for name in state:
        with pytest.raises(ConfigError):
            Progress.from_json({key: value for key, value in state.items() if key != name})
