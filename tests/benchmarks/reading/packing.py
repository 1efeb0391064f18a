"""Padding of blocks into which whole samples are packed, next to simpler ways, and the cost.

Lengths are distributed as in public corpora, and those longer than a block are left out. No bytes
are read.
"""

import time
from collections.abc import Callable, Sequence

from benchmarks.measure import Figure, Row, Target, call
from benchmarks.workplace import Workplace
from shardcache_client.order.packing import pack
from support.shards.packed import groups, in_step
from support.shards.text_lengths import WORDS, draw_lengths

SAMPLES = 40_960
MAX_TOKENS = 8_192
WINDOW = 512
RANKS = 8
MAX_PADDING_PERCENT = 3.0
MIN_SAMPLES_PER_CPU_S = 100_000
# Most papers are longer than half a block, so that no way of packing them leaves little padding.
_LONG_TEXTS = "arxiv"
_LEAST_SAMPLES = 8 * WINDOW


def measure(place: Workplace) -> list[Row]:
    """Return the padding by corpus, for one rank and for several in step, and the speed."""
    samples = max(_LEAST_SAMPLES, round(SAMPLES * place.scale))
    rows = []
    for corpus in WORDS:
        place.say(f"packing {corpus}")
        rows += _of_one_rank(corpus, samples)
    rows.append(_of_ranks_in_step("c4", samples))

    speeds = [call(samples_per_cpu_s, corpus="c4", samples=samples) for _ in range(place.rounds)]
    what = f"packed, c4, blocks of {MAX_TOKENS:,}, window {WINDOW}"
    target = Target("≥", MIN_SAMPLES_PER_CPU_S)
    return [*rows, Row("samples/CPU-s", what, Figure(speeds), target=target)]


def _of_one_rank(corpus: str, samples: int) -> list[Row]:
    lengths = draw_lengths(corpus, samples, MAX_TOKENS)
    what = f"padding, {corpus}, blocks of {MAX_TOKENS:,}, window {WINDOW}"
    peers = {
        "best fit, equal windows": in_equal_windows,
        "first fit, equal windows": first_fit,
        "next fit": next_fit,
        "best fit, no window": all_at_a_time,
    }
    ours = padding_percent(lengths, MAX_TOKENS, in_groups(lengths, MAX_TOKENS, WINDOW))
    target = None if corpus == _LONG_TEXTS else Target("≤", MAX_PADDING_PERCENT)
    rows = [Row("%", what, ours, target=target)]
    for peer, count_blocks in peers.items():
        blocks = count_blocks(lengths, MAX_TOKENS, WINDOW)
        rows.append(Row("%", what, ours, peer, padding_percent(lengths, MAX_TOKENS, blocks)))
    return rows


def _of_ranks_in_step(corpus: str, samples: int) -> Row:
    ranks = [draw_lengths(corpus, samples, MAX_TOKENS, seed) for seed in range(RANKS)]
    what = f"padding, {corpus}, {RANKS} ranks in step"
    every = [length for lengths in ranks for length in lengths]

    (packed, *_) = in_step(ranks, MAX_TOKENS, WINDOW)
    steps = sum(len(group.blocks) for group in packed)
    ours = padding_percent(every, MAX_TOKENS, RANKS * steps)
    theirs = padding_percent(every, MAX_TOKENS, RANKS * greatest_of_each_window(ranks))
    return Row("%", what, ours, "greatest number of each window", theirs, Target("≤", 0.5))


def padding_percent(lengths: Sequence[int], max_tokens: int, blocks: int) -> float:
    """Return the share of the blocks' tokens that are no sample's."""
    return 100 * (1 - sum(lengths) / (blocks * max_tokens))


Counting = Callable[[Sequence[int], int, int], int]
"""Returns the number of blocks of samples, by lengths, maximum number of tokens and window."""


def in_groups(lengths: Sequence[int], max_tokens: int, window: int) -> int:
    """Return the number of blocks that our packing makes."""
    return sum(len(group.blocks) for group in groups(lengths, max_tokens, window))


def in_equal_windows(lengths: Sequence[int], max_tokens: int, window: int) -> int:
    """Return the number of blocks of best fit in consecutive windows, without any carried over."""
    starts = range(0, len(lengths), window)
    return sum(len(pack(lengths[start : start + window], max_tokens)) for start in starts)


def first_fit(lengths: Sequence[int], max_tokens: int, window: int) -> int:
    """Return the number of blocks of first fit in consecutive windows."""
    blocks = 0
    for start in range(0, len(lengths), window):
        rooms: list[int] = []
        for length in lengths[start : start + window]:
            fitting = (number for number, room in enumerate(rooms) if length <= room)
            number = next(fitting, len(rooms))
            if number == len(rooms):
                rooms.append(max_tokens)
            rooms[number] -= length
        blocks += len(rooms)
    return blocks


def next_fit(lengths: Sequence[int], max_tokens: int, window: int) -> int:
    """Return the number of blocks if each takes samples until one does not fit; no window."""
    blocks = 0
    room = 0
    for length in lengths:
        if length > room:
            blocks += 1
            room = max_tokens
        room -= length
    return blocks


def all_at_a_time(lengths: Sequence[int], max_tokens: int, window: int) -> int:
    """Return the number of blocks of best fit over all samples."""
    return len(pack(lengths, max_tokens))


def greatest_of_each_window(ranks: Sequence[Sequence[int]]) -> int:
    """Return the number of blocks of ranks that give equally many samples, window by window."""
    steps = 0
    for start in range(0, len(ranks[0]), WINDOW):
        windows = [lengths[start : start + WINDOW] for lengths in ranks]
        steps += max(len(pack(window, MAX_TOKENS)) for window in windows)
    return steps


def samples_per_cpu_s(corpus: str, samples: int) -> float:
    """Return how many samples a process packs per second of its processor time."""
    lengths = draw_lengths(corpus, samples, MAX_TOKENS)
    started_s = time.process_time()
    in_groups(lengths, MAX_TOKENS, WINDOW)
    return samples / (time.process_time() - started_s)
