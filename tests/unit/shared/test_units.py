"""units.py: sizes and durations as people read them."""

import pytest

from shardcache.shared.units import age, duration, size


@pytest.mark.parametrize(
    ("value_bytes", "shown"),
    [
        (0, "0 Bytes"),
        (1, "1 Byte"),
        (999, "999 Bytes"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_250_000_000, "1.2 GB"),
        (-2_000, "-2.0 kB"),
        (10**21, "1000.0 EB"),
    ],
)
def test_size_has_the_unit_that_leaves_fewest_digits(value_bytes: int, shown: str) -> None:
    """One digit after the point, and less than 1,000 before it while there is a larger unit."""
    assert size(value_bytes) == shown


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [
        (0.0004, "0 ms"),
        (0.85, "850 ms"),
        (3.21, "3.2 s"),
        (60, "a minute"),
        (150, "2 minutes"),
        (3_599, "59 minutes"),
        (3_600, "an hour"),
        (9_000, "2 hours"),
        (86_399, "23 hours"),
        (86_400, "a day"),
        (100 * 86_400, "100 days"),
    ],
)
def test_duration_has_whole_numbers_of_its_largest_unit(value_s: float, shown: str) -> None:
    """Below a minute it keeps a digit after the point."""
    assert duration(value_s) == shown


def test_age_of_less_than_a_second_is_now() -> None:
    """Older ones are durations."""
    assert age(0.4) == "now"
    assert age(4_000) == "an hour ago"
