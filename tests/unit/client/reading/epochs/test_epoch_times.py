"""Shares of an epoch's time, by a clock that is set by hand."""

import pytest

from shardcache_client.reading.epochs.epoch_times import BatchTimes, EpochTimes


@pytest.mark.parametrize(
    ("made", "received_s", "expected"),
    [
        # Without workers, a batch is made while the loop waits: 6 s for shards, 2 s of decoding,
        # and so on.
        (
            BatchTimes(4, 10.0, 20.0, 6.0, 2.0, 1.0),
            20.0,
            {"shards": 6.0, "decoding": 2.0, "collating": 1.0, "reading": 1.0},
        ),
        # A worker has made it during the step; the loop waits for its bytes.
        (BatchTimes(4, 0.0, 10.0, 5.0, 5.0, 0.0), 12.0, {"handover": 2.0}),
        # A worker has made half of it during the step: the other half costs time, in the same
        # proportions.
        (
            BatchTimes(4, 5.0, 15.0, 0.0, 8.0, 2.0),
            16.0,
            {"decoding": 4.0, "collating": 1.0, "handover": 1.0},
        ),
        # A worker has yet to be started.
        (BatchTimes(4, 18.0, 20.0, 0.0, 0.0, 2.0), 21.0, {"collating": 2.0, "handover": 9.0}),
        # It takes no time at all.
        (BatchTimes(4, 10.0, 10.0, 0.0, 0.0, 0.0), 10.0, {}),
    ],
)
def test_the_loops_time_is_attributed_to_what_it_waits_for(
    made: BatchTimes, received_s: float, expected: dict[str, float]
) -> None:
    """Of each second, once; the ceiling is the rate of the steps alone."""
    now_s = iter([10.0, received_s, received_s + 10.0])
    times = EpochTimes(3, lambda: next(now_s))
    times.received(made)
    times.stepped()
    found = times.to_json()
    passed_s = received_s
    assert {
        name: round(share * passed_s, 6) for name, share in found.pop("shares").items() if share
    } == (expected | {"step": 10.0})
    assert found == {
        "epoch": 3,
        "batches": 1,
        "samples": 4,
        "seconds": passed_s,
        "samples_per_s": 4 / passed_s,
        "ideal_samples_per_s": 0.4,
    }


def test_the_line_of_an_epoch_names_the_largest_share_first() -> None:
    now_s = iter([0.0, 6.0, 10.0])
    times = EpochTimes(0, lambda: next(now_s))
    assert str(times).startswith("epoch 0: 0 samples/s; 0.0 s: step 0%")
    times.received(BatchTimes(1000, 0.0, 6.0, 1.0, 5.0, 0.0))
    times.stepped()
    assert str(times) == (
        "epoch 0: 100 samples/s (250 if data were free); 10.0 s: "
        "decoding 50%, step 40%, shards 10%, reading 0%, collating 0%, handover 0%"
    )
