"""object_parts.py: when the whole object is cheaper than its parts, by the prices of its store."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardcache.plan.object_parts import max_parts_per_request, whole_share

KIB = 1024
PART_BYTES = 256 * KIB


@pytest.mark.parametrize(
    ("per_gb", "per_1000", "share"),
    [
        (None, None, 0.5),
        (0.0, 0.0, 0.5),
        (0.09, 0.0004, 0.98),  # bytes that leave a region
        (0.0, 0.0004, 1 / 16),  # within it: sixteen parts are one request
        (None, 0.0004, 0.5),  # one price alone says nothing
        (0.01, None, 0.5),
    ],
)
def test_share_follows_from_the_prices(
    per_gb: float | None, per_1000: float | None, share: float
) -> None:
    """Dear bytes ask for parts, dear requests for the whole; without prices it is half."""
    assert whole_share(None, PART_BYTES, per_gb, per_1000) == pytest.approx(share, abs=0.005)


@given(
    st.integers(64 * KIB, 8 * 1024 * KIB),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 500),
    st.integers(1, 500),
)
def test_no_more_than_twice_the_least_cost_is_paid(
    part_bytes: int, per_gb: float, per_1000: float, parts: int, wanted: int
) -> None:
    """Whatever number of parts is wanted in the end."""
    assume(wanted <= parts)
    assume(per_gb > 1e-6 or per_1000 > 1e-6)
    part = part_bytes / 1e9 * per_gb
    request = per_1000 / 1e3
    whole = parts * (part + request / max_parts_per_request(part_bytes))
    alone = wanted * (part + request)

    threshold = parts * whole_share(None, part_bytes, per_gb, per_1000)
    paid = alone
    if wanted > threshold:  # the parts up to it were fetched alone, then the whole
        paid = min(alone, threshold * (part + request)) + whole
    assert paid <= 2 * min(alone, whole) * (1 + 1e-6)


def test_number_in_the_settings_comes_before_the_prices() -> None:
    assert whole_share(30, PART_BYTES, 0.09, 0.0004) == 0.3
