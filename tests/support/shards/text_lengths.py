"""Lengths of texts, distributed as in corpora that language models are trained on.

Quantiles of the number of words per document in parts of Dolma, as AnswerDotAI/ModernBERT published
them (src/data/source_stats.jsonl at commit b1158087a210): runs of letters and digits, counted in a
fifth of the documents. A word is taken for 4/3 tokens, which is usual for English. Between two
quantiles lengths are log-uniform; the longest 1 % follow the power law through the last two.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

TOKENS_PER_WORD = 4 / 3

# Shares of the documents that have at most so many words.
SHARES = (0, 0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99)

# fmt: off
WORDS: dict[str, tuple[int, ...]] = {
    "c4": (
        2, 26, 46, 64, 81, 98, 117, 138, 162, 188, 217,
        250, 288, 330, 379, 437, 506, 594, 719, 916, 1336, 3080,
    ),
    "refinedweb": (
        1, 30, 61, 78, 97, 117, 139, 162, 189, 218, 251,
        288, 329, 377, 432, 497, 573, 673, 814, 1038, 1541, 3925,
    ),
    "wikipedia": (
        3, 23, 28, 37, 46, 56, 70, 86, 105, 127, 153,
        184, 220, 262, 312, 374, 452, 559, 717, 985, 1594, 4023,
    ),
    "starcoder": (
        1, 9, 20, 32, 45, 57, 69, 83, 98, 117, 138,
        162, 191, 225, 268, 321, 390, 486, 630, 878, 1442, 4089,
    ),
    "flan": (
        4, 22, 31, 40, 46, 54, 62, 71, 81, 92, 104,
        118, 132, 149, 168, 192, 227, 272, 339, 449, 928, 1314,
    ),
    "pes2o": (
        47, 68, 87, 105, 119, 132, 146, 159, 171, 184, 200,
        216, 233, 254, 276, 306, 381, 1346, 2761, 4014, 5809, 9788,
    ),
    "open-web-math": (
        1, 35, 80, 125, 168, 212, 259, 311, 371, 439, 520,
        616, 735, 885, 1088, 1382, 1846, 2680, 4125, 6350, 10323, 21475,
    ),
    "arxiv": (
        2, 82, 2013, 2925, 3547, 4111, 4657, 5197, 5726, 6252, 6791,
        7383, 8044, 8784, 9622, 10590, 11735, 13118, 14962, 17786, 23247, 41547,
    ),
}
# fmt: on


def draw_lengths(corpus: str, samples: int, max_tokens: int, seed: int = 0) -> list[int]:
    """Return lengths in tokens, from 1 to `max_tokens`; longer documents are left out, not cut."""
    return list(islice(_lengths(corpus, max_tokens, seed), samples))


def _lengths(corpus: str, max_tokens: int, seed: int) -> Iterator[int]:
    source = random.Random(f"{corpus}/{seed}")
    while True:
        words = _quantile(WORDS[corpus], source.random())
        length = max(1, round(words * TOKENS_PER_WORD))
        if length <= max_tokens:
            yield length


def _quantile(quantiles: Sequence[int], share: float) -> float:
    upper = min(bisect_right(SHARES, share), len(SHARES) - 1)
    lower = upper - 1
    if share < SHARES[-1]:
        way = (share - SHARES[lower]) / (SHARES[upper] - SHARES[lower])
    else:
        # Along the power law, the logarithm of the share that is longer falls evenly.
        way = _fall(lower, share) / _fall(lower, SHARES[upper])
    return quantiles[lower] * math.pow(quantiles[upper] / quantiles[lower], way)


def _fall(lower: int, share: float) -> float:
    return math.log((1 - SHARES[lower]) / (1 - share))
