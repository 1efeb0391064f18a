"""Order of reading: every sample once, ranks equal, another order each epoch, any topology."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.errors import ConfigError
from shardcache_client.order.deal import SampleDeal, ShardDeal, check
from shardcache_client.order.division import Even, Partition, Phase
from shardcache_client.order.rounds import Shuffle
from shardcache_client.topology import Topology
from support.shards.dealt import Place, everybody, walk

manifests = st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any)
evens = st.sampled_from(["pad", "drop", None])
# Up to 64 ranks of 16 workers; mostly few, for there are samples enough to count.
sizes = st.one_of(st.tuples(st.integers(1, 4), st.integers(1, 3)), st.tuples(st.integers(1, 64), st.integers(1, 16)))
crews = st.lists(st.tuples(sizes, st.integers(1, 5)), min_size=2, max_size=4)
shuffles = st.one_of(
    st.none(),
    st.builds(Shuffle, seed=st.integers(-5, 2**70), window=st.integers(0, 9), groups=st.integers(1, 5)),
)


def deals(counts: Sequence[int], shuffle: Shuffle | None, even: Even, batch_size: int) -> SampleDeal:
    """Return a deal of rounds as epochs."""
    return SampleDeal(counts, shuffle, even, batch_size)


def places(counts: Sequence[int]) -> Counter[Place]:
    """Return every sample of a manifest, once."""
    return Counter((shard, number) for shard, count in enumerate(counts) for number in range(count))


def rank_sizes(read: list[list[Place]], cut: Partition) -> list[int]:
    """Return how many samples each rank reads."""
    return [sum(map(len, read[rank * cut.workers :][: cut.workers])) for rank in range(cut.world_size)]


@settings(max_examples=150, deadline=None)
@given(manifests, shuffles, evens, sizes, st.integers(1, 5), st.integers(0, 3))
def test_every_sample_once_whatever_the_topology(
    counts: list[int], shuffle: Shuffle | None, even: Even, size: tuple[int, int], batch_size: int, epoch: int
) -> None:
    """One shard for a thousand readers, empty shards, fewer samples than ranks: nothing lost or repeated."""
    cut = Partition(*size, even, batch_size)
    read = everybody(deals(counts, shuffle, even, batch_size), epoch, cut)
    count, every = Counter(place for reader in read for place in reader), places(counts)
    ranks = rank_sizes(read, cut)
    if even is None:
        assert count == every
        assert max(ranks) - min(ranks) <= 1
    else:
        assert len(set(ranks)) == 1
        assert abs(count.total() - every.total()) < cut.world_size
        assert set(count) == set(every) if even == "pad" else count <= every


@settings(max_examples=100, deadline=None)
@given(manifests, shuffles, crews, st.integers(0, 10**6))
def test_the_rest_of_an_epoch_is_read_once_by_any_other_topology(
    counts: list[int], shuffle: Shuffle | None, crews: list[tuple[tuple[int, int], int]], step: int
) -> None:
    """From whatever step, mixed or not, and again and again: what was read and what comes make up the epoch."""
    count: Counter[Place] = Counter()
    phases: list[Phase] = []
    for nth, (size, batch_size) in enumerate(crews):
        cut = Partition(*size, None, batch_size)
        read = everybody(deals(counts, shuffle, None, batch_size), 1, cut, phases)
        last = nth == len(crews) - 1
        taken = [len(reader) if last else step * (i + 7) % (len(reader) + 1) for i, reader in enumerate(read)]
        count.update(place for reader, steps in zip(read, taken, strict=True) for place in reader[:steps])
        phases.append(Phase(cut, tuple(taken)))
    assert count == places(counts)


@settings(max_examples=60, deadline=None)
@given(manifests, shuffles, sizes, st.integers(1, 200))
def test_epochs_of_any_length_follow_each_other(
    counts: list[int], shuffle: Shuffle | None, size: tuple[int, int], samples: int
) -> None:
    """With samples_per_epoch each sample comes again only when all have come: the epochs cut an endless sequence."""
    cut = Partition(*size, None)
    deal = SampleDeal(counts, shuffle, None, 1, samples)
    whole = sum(counts)
    rounds = -(-3 * samples // whole)
    read = [place for epoch in range(3) for reader in everybody(deal, epoch, cut) for place in reader]
    assert len(read) == 3 * samples
    assert max(Counter(read).values()) <= rounds
    assert set(Counter(read)) == set(places(counts)) or 3 * samples < whole


def test_two_epochs_differ_and_one_repeats() -> None:
    """Another order of shards and of samples in each epoch, the same one each time for the same seed."""
    deal = deals([30] * 10, Shuffle(seed=3), "pad", 1)
    read = [everybody(deal, epoch, Partition(2, 2)) for epoch in (0, 1, 0)]
    assert read[0] == read[2] != read[1]
    assert everybody(deals([30] * 10, Shuffle(seed=4), "pad", 1), 0, Partition(2, 2)) != read[0]


_ORDER = """
import json
from shardcache_client.order.deal import SampleDeal
from shardcache_client.order.rounds import Shuffle
from shardcache_client.order.division import Partition
from support.shards.dealt import everybody
print(json.dumps(everybody(SampleDeal([7, 0, 31, 12, 5], Shuffle(11, 3, 2), "pad", 4), 5, Partition(2, 2, "pad", 4))))
"""


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_the_order_is_pinned(hash_seed: str) -> None:
    """In every process and with every hash seed this is the order, and it stays so in later releases."""
    ran = subprocess.run(
        [sys.executable, "-c", _ORDER],
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "tests"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert hashlib.sha256(json.dumps(json.loads(ran.stdout)).encode()).hexdigest()[:16] == "274173e9d8aab60b"


def test_nodes_keep_their_shards() -> None:
    """With as many canonical nodes as nodes, a node meets almost only shards that it has met in every epoch."""
    counts = [40 + shard % 7 for shard in range(64)]
    deal = deals(counts, Shuffle(seed=1, groups=4), "pad", 1)
    met = [[{shard for shard, _ in reader} for reader in everybody(deal, epoch, Partition(4, 1))] for epoch in range(5)]
    for node in range(4):
        always = set.intersection(*(met[epoch][node] for epoch in range(5)))
        ever = set.union(*(met[epoch][node] for epoch in range(5)))
        assert len(always) >= 13
        assert len(ever) <= 26  # all of its group's, and in each epoch at most one at either border
    free = deals(counts, Shuffle(seed=1), "pad", 1)
    assert len(set.union(*({s for s, _ in everybody(free, epoch, Partition(4, 1))[0]} for epoch in range(5)))) > 40


def test_a_reader_needs_only_its_own_part_of_the_epoch() -> None:
    """Mixing does not reach beyond a reader's span: it has at most one shard more than its samples fill."""
    deal = deals([100] * 32, Shuffle(seed=2), "pad", 1)
    for reader in everybody(deal, 0, Partition(4, 2)):
        assert len({shard for shard, _ in reader}) <= 5


def test_whole_shards_go_to_one_reader_each() -> None:
    """Where samples are not counted; in another order each epoch."""
    deal = ShardDeal(10, Shuffle(seed=1))
    shares = [deal.share(0, 0, Topology(0, 1, worker, 3)).shards() for worker in range(3)]
    assert sorted(shard for share in shares for shard in share) == list(range(10))
    assert shares != [deal.share(1, 0, Topology(0, 1, worker, 3)).shards() for worker in range(3)]


def test_ranks_without_counts_are_refused_at_the_start() -> None:
    """Rather than found hanging at the end; unless something says how many samples there are, or that it is all one."""
    ranks = Topology(0, 2)
    with pytest.raises(ConfigError, match="shardcache index"):
        check(ShardDeal(10), ranks, "pad")
    check(ShardDeal(10), Topology(), "pad")
    check(ShardDeal(10, samples_per_epoch=100), ranks, "pad")
    check(ShardDeal(10), ranks, None)
    with pytest.raises(ConfigError, match="fewer samples"):
        check(SampleDeal([1], even="drop"), ranks, "drop")


def test_share_resumes_after_any_place() -> None:
    """The shards behind a place are the whole share's, from any place, without reading those before."""
    counts = [9, 3, 0, 14, 6]
    deal = deals(counts, Shuffle(seed=5, window=3), "pad", 1)
    share = deal.share(0, 0, Topology(1, 2))
    whole = walk(share, counts)
    for taken in range(len(whole) + 1):
        assert walk(share.behind(taken), counts) == whole[taken:]
