"""Which shards go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.replacement import Candidate, choose_victims
from shardcache.plan.timeline import NEVER

CANDIDATES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20) | st.just(NEVER)), max_size=10)


@given(CANDIDATES, st.integers(-5, 200), st.integers(0, 20))
def test_victims_suffice_come_in_order_and_are_needed_later(
    rows: list[tuple[int, float]], wanted_bytes: int, needed_in: int
) -> None:
    """What goes frees enough, is needed later than what comes, oldest first, and not one more than needed."""
    next_use = {str(number): use for number, (_, use) in enumerate(rows)}
    candidates = [Candidate(str(number), size) for number, (size, _) in enumerate(rows)]
    victims = choose_victims(candidates, wanted_bytes, next_use.__getitem__, needed_in)
    allowed = [candidate for candidate in candidates if next_use[candidate.key] > needed_in]
    if victims is None:
        assert sum(candidate.size_bytes for candidate in allowed) < wanted_bytes
    else:
        chosen = allowed[: len(victims)]
        assert victims == [candidate.key for candidate in chosen]
        assert sum(candidate.size_bytes for candidate in chosen) >= wanted_bytes
        assert not chosen or sum(candidate.size_bytes for candidate in chosen[:-1]) < wanted_bytes


def test_nothing_goes_when_nothing_is_wanted() -> None:
    """A cache with room evicts nothing."""
    assert choose_victims([Candidate("a", 10)], 0, lambda _key: NEVER, 0) == []
