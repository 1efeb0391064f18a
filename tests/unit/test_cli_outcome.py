"""The demo's judgement of what its jobs saw."""

from __future__ import annotations

import pytest

from shardcache.cli.demo.outcome import Dataset, Epoch, Outcome, epochs_of

DATASET = Dataset(frozenset({"a", "b", "c"}), shards=1, size_bytes=100)


def epoch(*keys: str) -> Epoch:
    """Return an epoch in which these samples were seen."""
    return Epoch("job", 0, keys, loss=1.0, waited_s=0.1)


def test_ranks_are_joined_epoch_by_epoch() -> None:
    """Keys of all ranks come together, the loss is weighted by samples, and the longest wait counts."""
    ranks = [
        [{"keys": ["a", "b"], "loss": 1.0, "waited_s": 0.1}, {"keys": ["c"], "loss": 3.0, "waited_s": 0.2}],
        [{"keys": ["c"], "loss": 4.0, "waited_s": 0.5}, {"keys": [], "loss": 0.0, "waited_s": 0.0}],
    ]
    assert epochs_of("job", ranks) == [Epoch("job", 0, ("a", "b", "c"), 2.0, 0.5), Epoch("job", 1, ("c",), 3.0, 0.2)]


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (("a", "b", "c"), ""),
        (("a", "b"), "1 lost"),
        (("a", "b", "c", "c"), "1 repeated"),
        (("a", "a", "x"), "2 lost, 1 unknown, 1 repeated"),
    ],
)
def test_each_way_of_not_exactly_once_is_named(keys: tuple[str, ...], problem: str) -> None:
    """Lost, repeated and foreign samples are told apart, and any of them fails the demo."""
    seen = epoch(*keys)
    assert seen.problem(DATASET) == problem
    assert Outcome(DATASET, (epoch("a", "b", "c"), seen), origin_bytes=100).ok is not bool(problem)


@pytest.mark.parametrize("origin_bytes", [0, 99, 101, 200])
def test_bytes_from_the_store_must_be_exactly_the_dataset(origin_bytes: int) -> None:
    """Anything but once fails the demo, also less: then something else than the daemon served the samples."""
    outcome = Outcome(DATASET, (epoch("a", "b", "c"),), origin_bytes)
    assert not outcome.ok and outcome.to_json()["checks"] == {"exactly_once": True, "fetched_once": False}
