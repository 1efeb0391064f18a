"""The samples that a dataset deals: in the order of drawn seeds, some of them, and each once."""

import pytest

from shardcache.errors import ConfigError
from shardcache.shared.protocol import ShardRef
from shardcache_client.order.dealing.deal import ShardDeal
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.shards.choices import subset
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.parts.dataset_parts import DealtSamples
from shardcache_client.position.mixture_state import Terms

COUNTS = [5, 0, 8, 4]
RANKS = [Topology(rank, 2) for rank in range(2)]


def manifest(*counts: int | None) -> Manifest:
    return Manifest.of(
        ShardRef(f"{number}.tar", samples=count) for number, count in enumerate(counts)
    )


def test_a_drawn_seed_gives_way_to_that_of_a_state() -> None:
    """The samples come as in a dataset that was given the seed, and states name it."""
    drawn = DealtSamples.of(manifest(*COUNTS), DealOptions(Shuffle(3)), 3, {"": 3})
    given = DealtSamples.of(manifest(*COUNTS), DealOptions(Shuffle(7)), 7)
    resumed = drawn.on_terms(Terms({"": 7}))
    assert resumed.deal == given.deal
    assert resumed.identifiers == given.identifiers
    assert resumed.seed == 7
    assert resumed.drawn_seeds == {"": 7}


def test_a_given_seed_stays_whatever_a_state_names() -> None:
    """Workers of a loader know samples by their identity, which stays, too."""
    given = DealtSamples.of(manifest(*COUNTS), DealOptions(Shuffle(3)), 3)
    assert given.on_terms(Terms({"": 7})) is given


def test_samples_without_new_seeds_stay_the_same() -> None:
    """A state of this run, or one without seeds, changes nothing."""
    drawn = DealtSamples.of(manifest(*COUNTS), DealOptions(Shuffle(3)), 3, {"": 3})
    assert drawn.on_terms(Terms({"": 3})) is drawn
    assert drawn.on_terms(Terms({})) is drawn


def test_an_uneven_deal_has_each_sample_once() -> None:
    """Also of a dataset that repeats samples to make ranks equal, and of its whole shards."""
    samples = DealtSamples.of(manifest(*COUNTS), DealOptions(even="pad"))
    assert sum(samples.deal.rank_size(rank) or 0 for rank in RANKS) == 18
    uneven = samples.uneven_deal(samples.deal)
    assert [uneven.rank_size(rank) for rank in RANKS] == [8, 9]
    shards = samples.uneven_deal(samples.deal_of(counted=False))
    assert isinstance(shards, ShardDeal)
    assert shards.even is None


def test_another_size_of_batches_is_the_same_dataset() -> None:
    """States of one are read by the other."""
    samples = DealtSamples.of(manifest(*COUNTS), DealOptions(batch_size=4))
    batches = samples.in_batches_of(2)
    assert batches.deal_options.batch_size == 2
    assert batches.identifiers == samples.identifiers


def test_a_selection_is_another_dataset_of_fewer_samples() -> None:
    """It deals what was selected; one of nothing is an error."""
    samples = DealtSamples.of(manifest(*COUNTS), DealOptions())
    some = samples.selected(subset(COUNTS, [1, 2, 16]))
    assert some.manifest.samples == 3
    assert some.identifiers[True] != samples.identifiers[True]
    with pytest.raises(ConfigError, match="no sample is selected"):
        samples.selected(subset(COUNTS, []))


def test_uncounted_samples_cannot_be_dealt_one_by_one() -> None:
    """Their shards are dealt as a whole."""
    samples = DealtSamples.of(manifest(5, None), DealOptions())
    assert isinstance(samples.deal, ShardDeal)
    with pytest.raises(ConfigError, match="no longer known"):
        samples.deal_of(counted=True)
