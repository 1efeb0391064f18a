"""staged_epoch.py: what a reader is given of an epoch, and the states between its items."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from shardcache_client.batches.staged_epoch import StagedEpoch, StagedForm
from shardcache_client.order.dealing.deal import SampleDeal, ShardDeal
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace
from shardcache_client.position.progress import Progress
from shardcache_client.position.staged_state import Reached, Resume
from shardcache_client.stages.stage import EpochFacts, Mark, Placed

DEAL = SampleDeal([20], even=None)


class InPairs:
    """A stage that gives pairs, without a last sample that has no partner."""

    name = "in pairs"
    is_in_step = True

    def regrouped(self, samples: Iterator[Placed], facts: EpochFacts) -> Iterator[tuple[Any, Mark]]:
        """Yield each pair with the mark after it."""
        del facts
        pair = list(islice(samples, 2))
        while len(pair) == 2:
            yield [each.item for each in pair], Mark(pair[-1].place + 1)
            pair = list(islice(samples, 2))


def epoch_of(
    stage: InPairs | None = None,
    start: Resume | None = None,
    quota: int | None = None,
    **fields: Any,
) -> StagedEpoch:
    """Return an epoch of 20 places."""
    form = StagedForm("0" * 16, fields.pop("deal", DEAL), stage, 7, {}, **fields)
    return StagedEpoch(form, start or Resume(Progress(3)), Topology(0, 2), 20, quota)


def odd_places(start: int = 0) -> Iterator[Placed]:
    """Yield samples at odd places: the others were left out."""
    return (Placed(place, f"sample {place}") for place in range(start, 20) if place % 2)


def test_each_item_moves_the_reader_behind_its_place() -> None:
    """Places that were left out before it are passed with it."""
    epoch = epoch_of()
    items = epoch.items(odd_places())
    assert list(islice(items, 3)) == ["sample 1", "sample 3", "sample 5"]
    assert epoch.reached.mark == Mark(6)
    assert epoch.samples_left(epoch.reached) == 14


def test_epoch_is_read_once_an_end_was_asked_for() -> None:
    """Nobody knows before whether a further sample is left out."""
    epoch = epoch_of()
    items = epoch.items(odd_places())
    assert len(list(islice(items, 10))) == 10
    assert not epoch.is_read
    assert list(items) == []
    assert epoch.is_read


@pytest.mark.parametrize("stage", [None, InPairs()])
def test_quota_ends_the_epoch(stage: InPairs | None) -> None:
    """Of samples, however many of them a stage makes an item of."""
    epoch = epoch_of(stage, quota=6)
    assert len(list(epoch.items(odd_places()))) == (6 if stage is None else 3)
    assert epoch.is_read is True
    assert epoch.reached.samples == 6
    assert epoch.samples_left(epoch.reached) == 0


def test_quota_is_known_to_be_filled_before_the_last_item_is_taken() -> None:
    """As a loop that knows the number of samples requests no more."""
    epoch = epoch_of(quota=2)
    ended = [epoch.is_read for _ in epoch.items(odd_places())]
    assert ended == [False, True]


@pytest.mark.parametrize("stage", [None, InPairs()])
def test_quota_counts_what_was_given_before(stage: InPairs | None) -> None:
    """In a run that is resumed after each item."""
    start = Resume(Progress(3))
    found: list[Any] = []
    for _ in range(3):
        epoch = epoch_of(stage, start, 6)
        found += islice(epoch.items(odd_places(start.reached.mark.place)), 1)
        start = Resume(Progress(3), epoch.reached)
    last = epoch_of(stage, start, 6)
    found += list(last.items(odd_places(start.reached.mark.place)))
    assert found == list(epoch_of(stage, None, 6).items(odd_places()))


def test_step_of_a_state_is_the_last_that_begins_at_or_before_its_place() -> None:
    """Later ones were begun for what is read ahead."""
    epoch = epoch_of(deal=ShardDeal(5))
    epoch.begun_steps += [
        StepPlace(0, 0, 0),
        StepPlace(0, 1, 4),
        StepPlace(0, 2, 6),
        StepPlace(0, 3, 9),
    ]
    assert next(epoch.items(odd_places(5))) == "sample 5"
    assert epoch.reached == Reached(Mark(6), 0, StepPlace(0, 2, 6))


@pytest.mark.parametrize(
    ("fields", "is_in_step"),
    [({}, True), ({"leaves_out": True}, False), ({"deal": ShardDeal(5)}, False)],
)
def test_ranks_are_in_step_if_their_places_are_known_to_be_the_same(
    fields: dict[str, Any], is_in_step: bool
) -> None:
    """By a stage that keeps them so, of counted samples of which none is left out."""
    state = epoch_of(InPairs(), **fields).state(Reached(), ended=False, over=False)
    assert state.in_step == is_in_step
    assert not epoch_of(None, **fields).state(Reached(), ended=False, over=False).in_step
