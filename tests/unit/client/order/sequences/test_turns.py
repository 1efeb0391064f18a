"""turns.py: how several lanes take turns, compared with a count of the turns one by one."""

from fractions import Fraction
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache_client.order.sequences.lane_turns import Proportions, Rotated, Turns, Widened

sizes = st.lists(
    st.integers(0, 60) | st.sampled_from([0, 1, 1, 500]), min_size=1, max_size=12
).filter(any)
small_sizes = st.lists(
    st.integers(0, 12) | st.sampled_from([0, 1, 1, 60]), min_size=1, max_size=8
).filter(any)


def turns_of(samples: list[int]) -> list[int]:
    """Return the lane of each place."""
    return [*map(Proportions(tuple(samples)).lane, range(sum(samples)))]


@settings(deadline=None)
@given(sizes)
def test_any_place_is_found_without_those_before_it(samples: list[int]) -> None:
    """Counts before a place, and the place of a turn, are what counting from the start gives."""
    proportions = Proportions(tuple(samples))
    counts = [0] * len(samples)
    for place, lane in enumerate(turns_of(samples)):
        assert list(proportions.before(place)) == counts
        assert proportions.place(lane, counts[lane]) == place
        counts[lane] += 1
    assert list(proportions.before(sum(samples))) == samples


def worst(samples: list[int]) -> tuple[Fraction, Fraction]:
    """Return the greatest error of a lane's count among the first places and any window."""
    turns = turns_of(samples)
    total = sum(samples)
    errors = [0]
    spreads = [0]
    for lane, size in enumerate(samples):
        counts = accumulate((turn == lane for turn in turns), initial=0)
        drift = [count * total - place * size for place, count in enumerate(counts)]
        errors.append(max(map(abs, drift)))
        spreads.append(max(drift) - min(drift))  # every pair of places is the ends of a window
    return Fraction(max(errors), total), Fraction(max(spreads), total)


@given(sizes)
def test_every_window_has_the_proportions(samples: list[int]) -> None:
    """The error stays below 2 after any place and below 4 in any window."""
    error, spread = worst(samples)
    assert error < 2
    assert spread < 4
    if len([size for size in samples if size]) <= 2:
        assert error <= Fraction(1, 2)
        assert spread <= 1


def test_the_turns_are_pinned() -> None:
    """A run that goes on under a later release finds the sequence that it began with."""
    assert turns_of([5, 3, 0, 2]) == [0, 1, 0, 3, 0, 1, 0, 3, 0, 1]


@settings(deadline=None)
@given(small_sizes, st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_wide_turns_are_found_without_those_before(
    samples: list[int], spans: int, width: int, is_rotated: bool
) -> None:
    """Whole batches of one source, also where each span begins at another turn."""
    samples = [size * spans for size in samples]
    each = Proportions(tuple(samples))
    turns: Turns = Widened(Rotated(each, sum(samples) // spans) if is_rotated else each, width)
    counts = [0] * len(samples)
    for place in range(width * sum(samples)):
        lane = turns.lane(place)
        assert lane == turns.lane(place // width * width)
        assert list(turns.before(place)) == counts
        assert turns.place(lane, counts[lane]) == place
        counts[lane] += 1
    assert counts == [width * size for size in samples]


def test_rotated_spans_have_different_lanes_at_a_time() -> None:
    """Although all of them have the same turns, one after another."""
    turns = Rotated(Proportions((32, 32)), 8)
    steps = [{turns.lane(span * 8 + step) for span in range(8)} for step in range(8)]
    assert steps == [{0, 1}] * 8
