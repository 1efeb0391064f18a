"""Spans of samples of which some members are read: gaps where large other members lie between."""

from collections.abc import Collection
from typing import Any

from shardcache.shared.tarindex.members import BLOCK_BYTES
from shardcache.shared.tarindex.spans import RowSpans

MIB = 1024 * 1024


def row_of(sizes: dict[str, list[int | None]], irregular: Collection[int] = ()) -> dict[str, Any]:
    """Return the row of a table that describes samples with members of some sizes."""
    count = len(next(iter(sizes.values())))
    blocks = [
        sum(
            1 + -(-size // BLOCK_BYTES)
            for size in (column[place] for column in sizes.values())
            if size is not None
        )
        for place in range(count)
    ]
    return {
        "keys": [f"{place}" for place in range(count)],
        "first_block": 0,
        "blocks": blocks,
        "sizes": sizes,
        "irregular": list(irregular),
    }


def blocks_of(size_bytes: int) -> int:
    """Return the number of bytes that a member takes in a tar, with its header."""
    return BLOCK_BYTES + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def test_large_member_between_two_chosen_ones_is_a_gap() -> None:
    """Of two samples, each with its own; the span reaches from the first member to the last."""
    row = row_of({"json": [100, 600], "jpg": [MIB, 2 * MIB], "cls": [1, 1], "txt": [9, 9]})
    spans = RowSpans.of(row, {"json", "cls"}.__contains__)

    start, stop = spans.span(0) or (0, 0)
    ((gap_start, gap_stop),) = spans.gaps_of(0)
    assert start == 0
    assert gap_start == blocks_of(100)
    assert gap_stop - gap_start == blocks_of(MIB)
    assert stop == gap_stop + blocks_of(1)
    second_start, _ = spans.span(1) or (0, 0)
    ((gap_start, gap_stop),) = spans.gaps_of(1)
    assert second_start == stop + blocks_of(9)
    assert gap_start == second_start + blocks_of(600)
    assert gap_stop - gap_start == blocks_of(2 * MIB)


def test_gaps_of_a_sample_are_its_own() -> None:
    """One sample has two, another has one of them, a third has none: its members are small."""
    row = row_of(
        {
            "a": [1, 1, 1],
            "large": [MIB, None, 10],
            "b": [1, 1, 1],
            "larger": [2 * MIB, 2 * MIB, 10],
            "c": [1, 1, 1],
        }
    )
    spans = RowSpans.of(row, {"a", "b", "c"}.__contains__)

    assert [stop - start for start, stop in spans.gaps_of(0)] == [
        blocks_of(MIB),
        blocks_of(2 * MIB),
    ]
    assert [stop - start for start, stop in spans.gaps_of(1)] == [blocks_of(2 * MIB)]
    assert spans.gaps_of(2) == ()


def test_members_between_count_together() -> None:
    """Several of them are as large as one."""
    parts: list[int | None] = [MIB // 4]
    row = row_of({"a": [1], "x": parts, "y": parts, "z": parts, "b": [1]})
    spans = RowSpans.of(row, {"a", "b"}.__contains__)
    ((start, stop),) = spans.gaps_of(0)
    assert stop - start == 3 * blocks_of(MIB // 4)


def test_rows_without_gaps_take_no_memory_for_them() -> None:
    """Rows whose members are all read, with large ones at the ends, or without offsets."""
    sizes: dict[str, list[int | None]] = {"jpg": [MIB], "a": [1], "b": [1], "mp4": [MIB]}
    assert RowSpans.of(row_of(sizes)).gaps == []
    assert RowSpans.of(row_of(sizes), {"a", "b"}.__contains__).gaps == []
    chosen = {"a", "mp4"}.__contains__
    middle: dict[str, list[int | None]] = {"a": [1], "jpg": [MIB], "mp4": [1]}
    assert RowSpans.of(row_of(middle), chosen).gaps != []
    assert RowSpans.of(row_of(middle, irregular=[0]), chosen).gaps == []
