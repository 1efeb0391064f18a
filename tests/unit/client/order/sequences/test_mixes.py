"""mixes.py: the mixed order of one reader's samples."""

from hypothesis import assume, given
from hypothesis import strategies as st

from shardcache_client.order.sequences.mixes import Mix
from shardcache_client.order.sequences.rounds import ListedPieces, Piece
from support.shards.dealt import steps_of

sizes = st.lists(st.integers(0, 50), max_size=12)
windows = st.integers(0, 10)


def mix_of(sizes: list[int], window: int, key: str = "7/0") -> Mix:
    """Return a mix of whole shards."""
    return Mix(ListedPieces(Piece(shard, key, 0, size) for shard, size in enumerate(sizes)), window)


def numbers_of(mix: Mix, piece: int) -> list[int]:
    """Return a piece's samples in the order in which it deals them."""
    whole = mix.pieces[piece]
    return list(whole.numbers(whole.stop or 0, permuted=mix.window > 0))


def step_of(mix: Mix, step: int) -> list[tuple[int, int]]:
    """Return a step's samples in order: piece, and number in the shard."""
    pieces = mix.pieces_at(step)
    parts = [mix.part(piece, step, numbers_of(mix, piece)) for piece in pieces]
    draws = [iter(part) for part in parts]
    return [
        (pieces[place], next(draws[place]))
        for place in mix.interleaved(step, [len(part) for part in parts])
    ]


def picks_of(mix: Mix) -> list[tuple[int, int]]:
    """Return all samples of a mix in order."""
    return [pick for step in range(mix.steps) for pick in step_of(mix, step)]


@given(sizes, windows)
def test_every_sample_comes_once(sizes: list[int], window: int) -> None:
    """Nothing is lost in the mix, nothing comes twice."""
    every = [(piece, number) for piece, size in enumerate(sizes) for number in range(size)]
    assert sorted(picks_of(mix_of(sizes, window))) == every


@given(sizes, windows, st.data())
def test_any_stretch_is_read_without_what_comes_before(
    sizes: list[int], window: int, data: st.DataObject
) -> None:
    """A leg between two places of a mix reads exactly what lies between, from its pieces."""
    mix = mix_of(sizes, window)
    assume(len(mix))
    start = data.draw(st.integers(0, len(mix) - 1))
    stop = data.draw(st.integers(start + 1, len(mix)))
    segment = mix.between(start, stop)
    picks = [
        pick for step, first, last in steps_of(segment) for pick in step_of(mix, step)[first:last]
    ]
    assert picks == picks_of(mix)[start:stop]
    assert {piece for piece, _ in picks} <= set(segment.pieces)


@given(sizes, windows)
def test_shards_enter_one_by_one_and_leave_after_a_window(sizes: list[int], window: int) -> None:
    """In a step there are samples of the last `window` pieces that entered, and of no others."""
    mix = mix_of(sizes, window)
    for step in range(mix.steps):
        present = {piece for piece, _ in step_of(mix, step)}
        assert (
            present <= set(mix.pieces_at(step)) <= set(range(step - max(1, window) + 1, step + 1))
        )
    assert [pick[0] for pick in picks_of(mix_of([1, 1, 1], window))] == [0, 1, 2], (
        "even the smallest gives its share"
    )


def test_window_0_reads_shards_as_they_were_written() -> None:
    """One after another, each in the order of its file."""
    assert picks_of(mix_of([2, 0, 3], 0)) == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]


def test_neighbours_come_a_third_of_the_window_apart() -> None:
    """In either order, as with samples put down at random over the window."""
    served = {pick: place for place, pick in enumerate(picks_of(mix_of([1000] * 40, 8)))}
    distances = [
        served[piece, n + 1] - served[piece, n] for piece in range(8, 32) for n in range(999)
    ]
    assert 0.9 < sum(map(abs, distances)) / len(distances) / (8 * 1000 / 3) < 1.1
    assert abs(sum(distance > 0 for distance in distances) / len(distances) - 0.5) < 0.02
