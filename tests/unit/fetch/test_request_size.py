"""Requests for several parts: as large as is cheap, as small as keeps every connection at work."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardcache.fetch.parts.request_size import MOST_PARTS, parts_per_request


def test_an_unknown_store_is_asked_for_single_parts() -> None:
    """A slow one would keep a reader waiting."""
    assert parts_per_request(1000, 1, None) == 1


def test_fast_connections_take_several_parts() -> None:
    """No more than arrive within a second."""
    assert [parts_per_request(1000, 1, part_s) for part_s in (0.1, 0.25, 0.34, 0.5, 0.6, 30.0)] == [4, 4, 2, 2, 1, 1]


def test_every_connection_has_something_to_do() -> None:
    """Of eight parts, one for each of eight connections, two for each of four."""
    assert [parts_per_request(8, connections, 0.01) for connections in (16, 8, 5, 4, 2, 1)] == [1, 1, 1, 2, 4, 4]


@given(st.integers(1, 10_000), st.integers(1, 1024), st.floats(1e-6, 1e6))
def test_bounds(missing: int, connections: int, part_s: float) -> None:
    """At least one, at most so many, and enough requests for the connections."""
    count = parts_per_request(missing, connections, part_s)
    assert 1 <= count <= MOST_PARTS
    assert -(-missing // count) >= min(missing, connections)
