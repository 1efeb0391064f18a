"""rounds.py: an endless sequence of rounds with every shard once, and epochs' parts."""

from hypothesis import given
from hypothesis import strategies as st

from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.sequences.rounds import Order

counts_of_shards = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)
shuffles = st.none() | st.builds(Shuffle, seed=st.integers(), groups=st.integers(1, 4))

Sample = tuple[int, int]


def samples_of(order: Order, start: int, stop: int, counts: list[int]) -> list[Sample]:
    """Return the samples between two positions, shuffled within shards: shard, and number in it."""
    return [
        (piece.shard, number)
        for piece in order.pieces(start, stop)
        for number in piece.numbers(counts[piece.shard], permuted=True)
    ]


@given(counts_of_shards, shuffles, st.data())
def test_any_interval_is_a_part_of_the_whole(
    counts: list[int], shuffle: Shuffle | None, data: st.DataObject
) -> None:
    """An interval reads the same wherever it was cut, over the ends of rounds, too."""
    order = Order(counts, shuffle)
    size = sum(counts)
    start = data.draw(st.integers(0, 3 * size))
    stop = data.draw(st.integers(start, 3 * size))
    whole = samples_of(order, 0, 3 * size, counts)
    assert samples_of(order, start, stop, counts) == whole[start:stop]
    every = [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]
    assert all(sorted(whole[first : first + size]) == every for first in range(0, 3 * size, size))
    assert all(piece.start < (piece.stop or 0) for piece in order.pieces(start, stop)), (
        "no piece is empty"
    )


def test_dataset_without_samples_has_no_pieces() -> None:
    """An order without any sample has none anywhere, rather than no end."""
    assert not [*Order([0, 0], None).pieces(0, 10)]
