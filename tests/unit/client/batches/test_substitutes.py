"""substitutes.py: places of an epoch whose samples replace a bad one."""

from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.batches.substitutes import substitute_places


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_substitutes_are_all_places_at_last(
    places: int, pass_places: int, data: st.DataObject
) -> None:
    """So many in a row that every sample is tried, if there is a good one at all."""
    place = data.draw(st.integers(0, places - 1))
    found = list(substitute_places(place, places, pass_places))
    assert set(found) <= set(range(places))
    row = {(place + nth) % places for nth in range(1, min(places, pass_places) + 1)}
    assert set(found[-len(row) :]) == row


@given(st.integers(100, 10**12), st.data())
def test_substitutes_of_neighbours_are_neighbours(places: int, data: st.DataObject) -> None:
    """Those of a lost shard come from few shards, far from it and from each other."""
    place = data.draw(st.integers(0, places - 2))
    ours = substitute_places(place, places, 9)
    theirs = substitute_places(place + 1, places, 9)
    some = [next(ours) for _ in range(5)]
    assert [(each + 1) % places for each in some] == [next(theirs) for _ in range(5)]
    apart = min(
        (one - other) % places for one in (place, *some) for other in (place, *some) if one != other
    )
    assert apart > places / 20
