"""The number of connections that fill a line is estimated from the parts that arrive over it."""

from __future__ import annotations

import pytest

from shardcache.fetch.limits import Link

PART = 8 * 1024 * 1024


def over(line: Link, *, fills: float, connections: int, parts: int = 5) -> Link:
    """Let parts arrive over a line that so many connections fill, with so many in use; quick parts take 1 s."""
    for _ in range(parts):
        line.took(PART, max(1.0, connections / fills), connections)
    return line


def test_nothing_is_known_before_a_part_arrived() -> None:
    """Until then nobody can tell."""
    assert Link().connections is None


@pytest.mark.parametrize("connections", [4, 8, 16, 64])
def test_a_full_line_is_as_wide_however_many_share_it(connections: int) -> None:
    """Three connections fill it; two more are tried."""
    line = over(Link(), fills=3, connections=2)
    assert over(line, fills=3, connections=connections).connections == 5


def test_a_wide_line_takes_ever_more() -> None:
    """Where parts take no longer, more connections are tried than there were."""
    line = Link()
    for connections in (1, 3, 5, 7):
        assert over(line, fills=100, connections=connections).connections == connections + 2


def test_one_slow_part_says_nothing_of_the_line() -> None:
    """A server that was busy for a moment does not make the line narrow."""
    line = over(Link(), fills=100, connections=8)
    line.took(PART, 50.0, 8)
    assert line.connections == 10


def test_a_line_that_became_slower_is_not_taken_for_full_for_ever() -> None:
    """A quick start is forgotten after some parts: then more connections are tried again."""
    line = over(Link(), fills=100, connections=8)
    for _ in range(5):
        line.took(PART, 10.0, 8)
    assert line.connections == 3
    for _ in range(64):
        line.took(PART, 10.0, 8)
    assert line.connections == 10


def test_a_part_is_compared_with_parts_of_its_size() -> None:
    """That the small last part of a shard comes sooner does not make the others late."""
    line = over(Link(), fills=100, connections=8)
    line.took(PART // 64, 0.01, 8)
    assert over(line, fills=100, connections=8).connections == 10
