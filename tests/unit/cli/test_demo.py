"""The demo's judgement of what its jobs saw."""

from typing import Any

import pytest

from shardcache.cli.demo.demo_outcome import DemoOutcome, Epoch, epochs_of

SAMPLES = frozenset("abc")


def leg(keys: str, *steps: int, promised: int = 2) -> list[dict[str, Any]]:
    """Return the reports of ranks after these steps; the first lists samples as letters."""
    ranks: list[dict[str, Any]] = [
        {"keys": "", "steps": each, "promised": promised, "waited_s": 0.1} for each in steps
    ]
    ranks[0]["keys"] = keys
    return ranks


def outcome(*legs: list[dict[str, Any]], origin_bytes: int = 100) -> DemoOutcome:
    """Return the outcome of a demo with one good epoch and one of these legs."""
    return DemoOutcome(
        SAMPLES, 1, 100, [Epoch("job", 0, [leg("abca", 2, 2)]), Epoch("job", 1, legs)], origin_bytes
    )


def test_reports_of_ranks_and_runs_are_joined_by_epoch() -> None:
    """The longest wait of each leg counts, and an epoch may have two legs."""

    def row(epoch: int, keys: str, waited_s: float) -> dict[str, Any]:
        return {"epoch": epoch, "keys": keys, "steps": 1, "promised": 1, "waited_s": waited_s}

    stopped = [[row(0, "ab", 0.1), row(1, "a", 0.25)], [row(0, "c", 0.5), row(1, "", 0.0)]]
    first, second = epochs_of("job", [stopped, [[row(1, "bc", 0.25)]]])
    assert "".join(first.keys) == "abc"
    assert len(first.legs) == 1
    assert "".join(second.keys) == "abc"
    assert second.steps == [[1, 1], [1]]
    assert [each.to_json(SAMPLES)["waited_s"] for each in (first, second)] == [0.5, 0.5]


WHOLE = leg("abca", 2, 2)


@pytest.mark.parametrize(
    ("legs", "wrong_samples", "wrong_steps"),
    [
        ([WHOLE], "", ""),
        ([leg("aba", 2, 2)], "1 lost", ""),
        ([leg("abc", 2, 2)], "0 repeated, expected 1 as padding", ""),
        ([leg("abaa", 2, 2)], "1 lost, 2 repeated, expected 1 as padding", ""),
        ([leg("aaxy", 2, 2)], "2 lost, 2 unknown", ""),
        ([leg("abca", 2, 1)], "", "the ranks took 2, 1 steps"),
        ([leg("abca", 1, 1)], "", "1 steps, but the loader's length is 2"),
        # Where a job resumed with other ranks, these share the remainder and its padding, whatever
        # the first ones were.
        ([leg("ab", 1, 1), leg("c", 1)], "", ""),
        ([leg("ab", 1, 1), leg("cc", 1, 1)], "", ""),
        ([leg("a", 1), leg("bc", 1, 1)], "", ""),
        ([leg("a", 1, 0), leg("bc", 2)], "", "the ranks took 1, 0 steps"),
    ],
)
def test_wrong_samples_and_steps_are_named(
    legs: list[Any], wrong_samples: str, wrong_steps: str
) -> None:
    """Lost, foreign and repeated samples are told apart, as are wrong steps."""
    seen = outcome(*legs)
    assert seen.epochs[1].sample_problems(SAMPLES) == wrong_samples
    assert seen.epochs[1].step_problem() == wrong_steps
    assert seen.checks == {
        "exactly_once": not wrong_samples,
        "equal_steps": not wrong_steps,
        "fetched_once": True,
    }
    assert seen.has_passed is not bool(wrong_samples or wrong_steps)


@pytest.mark.parametrize("origin_bytes", [99, 101])
def test_bytes_from_the_store_must_be_exactly_the_dataset(origin_bytes: int) -> None:
    """Any other number of bytes fails the demo, as fewer mean another source of samples."""
    seen = outcome(WHOLE, origin_bytes=origin_bytes)
    assert not seen.has_passed
    assert seen.checks == {"exactly_once": True, "equal_steps": True, "fetched_once": False}
