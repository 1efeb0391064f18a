"""The demo's judgement of what its jobs saw."""

from __future__ import annotations

import pytest

from shardcache.cli.demo.outcome import Dataset, Epoch, Leg, Outcome, epochs_of

DATASET = Dataset(frozenset({"a", "b", "c"}), shards=1, size_bytes=100)


def leg(keys: str, *steps: int, promised: int = 2) -> Leg:
    """Return what ranks that took so many steps saw, a letter a sample."""
    return Leg(tuple(keys), steps, (promised,) * len(steps), loss=1.0, waited_s=0.1)


def outcome(*legs: Leg, origin_bytes: int = 100) -> Outcome:
    """Return the outcome of a demo with one good epoch and one of these legs."""
    epochs = (Epoch("job", 0, (leg("abca", 2, 2),)), Epoch("job", 1, legs))
    return Outcome(DATASET, epochs, origin_bytes)


def test_ranks_are_joined_epoch_by_epoch() -> None:
    """Keys of all ranks come together, the loss is weighted by samples, and the longest wait counts."""
    ranks = [
        [{"epoch": 3, "keys": ["a", "b"], "steps": 2, "promised": 2, "loss": 1.0, "waited_s": 0.1}],
        [{"epoch": 3, "keys": ["c"], "steps": 1, "promised": 2, "loss": 4.0, "waited_s": 0.5}],
    ]
    assert epochs_of("job", [ranks]) == [Epoch("job", 3, (Leg(("a", "b", "c"), (2, 1), (2, 2), 2.0, 0.5),))]


def test_runs_that_share_an_epoch_are_its_legs() -> None:
    """The epoch is one, read before and after a restart."""

    def row(epoch: int, *keys: str) -> dict[str, object]:
        return {"epoch": epoch, "keys": keys, "steps": 1, "promised": 1, "loss": float(len(keys)), "waited_s": 0.25}

    first, second = epochs_of("job", [[[row(0, "a", "b", "c"), row(1, "a")]], [[row(1, "b", "c", "c")]]])
    assert (first.keys, len(first.legs)) == (("a", "b", "c"), 1)
    assert (second.keys, len(second.legs)) == (("a", "b", "c", "c"), 2)
    assert (second.loss, second.waited_s) == (2.5, 0.5)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ("abca", ""),
        ("aba", "1 lost"),
        ("abc", "0 repeated, expected 1 as padding"),
        ("abcab", "2 repeated, expected 1 as padding"),
        ("abaa", "1 lost, 2 repeated, expected 1 as padding"),
        ("aaxy", "2 lost, 2 unknown"),
    ],
)
def test_violations_of_exactly_once_are_named(keys: str, problem: str) -> None:
    """Lost, foreign and repeated samples are told apart, the padding of two ranks allowed for; any fails the demo."""
    seen = outcome(leg(keys, 2, 2))
    assert seen.epochs[1].wrong_samples(DATASET) == problem
    assert seen.checks["exactly_once"] is seen.ok is not bool(problem)


@pytest.mark.parametrize(
    ("legs", "problem"),
    [
        ((leg("abca", 2, 2),), ""),
        ((leg("abca", 2, 1),), "the ranks took 2, 1 steps"),
        ((leg("abca", 1, 1),), "1 steps, but the loader's length is 2"),
        ((leg("ab", 1, 1), leg("c", 1)), ""),
        ((leg("a", 1, 0), leg("bc", 2)), "the ranks took 1, 0 steps"),
    ],
)
def test_steps_are_equal_and_as_many_as_promised(legs: tuple[Leg, ...], problem: str) -> None:
    """Ranks that took unequal steps fail the demo, and so does a loader whose length was wrong for a whole epoch."""
    seen = outcome(*legs)
    assert seen.epochs[1].wrong_steps() == problem
    assert seen.checks["equal_steps"] is seen.ok is not bool(problem)


@pytest.mark.parametrize(
    ("legs", "padding"),
    [
        ((leg("ab", 1, 1), leg("c", 1)), 0),
        ((leg("ab", 1, 1), leg("cc", 1, 1)), 1),
        ((leg("a", 1), leg("bc", 1, 1)), 0),
    ],
)
def test_padding_is_that_of_the_ranks_that_end_the_epoch(legs: tuple[Leg, ...], padding: int) -> None:
    """Where a job went on with other ranks, what was left divides by them, and not the whole by the first ones."""
    seen = outcome(*legs)
    assert seen.epochs[1].padding(DATASET) == padding
    assert seen.checks["exactly_once"]


@pytest.mark.parametrize("origin_bytes", [0, 99, 101, 200])
def test_bytes_from_the_store_must_be_exactly_the_dataset(origin_bytes: int) -> None:
    """Anything but once fails the demo, also less: then something else than the daemon served the samples."""
    seen = outcome(leg("abca", 2, 2), origin_bytes=origin_bytes)
    checks = seen.to_json()["checks"]
    assert not seen.ok and checks == {"exactly_once": True, "equal_steps": True, "fetched_once": False}
