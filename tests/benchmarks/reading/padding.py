"""Share of padding in an accelerator's batches: batches by length next to batches of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace
from shardcache_client.lengths import batches, fewest

SAMPLES = 200_000
MAX_TOKENS = 16_000
LONGEST = 3_000
BUFFERS = (250, 1_000, 4_000)


def measure(place: Workplace) -> list[Row]:
    """Return the shares for lengths spread as those of spoken sentences are: log-normal, many short and few long."""
    draw = Random(7).lognormvariate
    lengths = [min(1 + int(draw(6, 0.6)), LONGEST) for _ in range(round(SAMPLES * place.scale))]
    # What fits into memory for certain is all that batches of one size may hold.
    fixed = _padding(_parts(lengths, MAX_TOKENS // LONGEST))
    return [
        Row(
            "padding",
            f"share of padding, sort_buffer {size:,}",
            _padding(batch for buffer in _parts(lengths, size) for batch in _by_length(buffer)),
            peer=f"batches of {MAX_TOKENS // LONGEST}",
            theirs=fixed,
            target=Target("≤", 0.1) if size == 1_000 else None,
        )
        for size in BUFFERS
    ]


def _parts(lengths: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (lengths[start : start + size] for start in range(0, len(lengths), size))


def _by_length(buffer: Sequence[int]) -> Iterator[list[int]]:
    for batch in batches(buffer, MAX_TOKENS, fewest(buffer, MAX_TOKENS)):
        yield [buffer[number] for number in batch]


def _padding(made: Iterator[Sequence[int]]) -> float:
    real = padded = 0
    for batch in made:
        real += sum(batch)
        padded += len(batch) * max(batch)
    return 1 - real / padded
