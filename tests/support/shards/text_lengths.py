"""Lengths of texts, distributed as in corpora that language models are trained on.

Quantiles of the number of words per document in parts of Dolma, as AnswerDotAI/ModernBERT published
them (src/data/source_stats.jsonl at commit b1158087a210): runs of letters and digits, counted in a
fifth of the documents. A word is taken for 4/3 tokens, which is usual for English. Between two
quantiles lengths are log-uniform; the longest 1 % follow the power law through the last two.
"""

import json
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

from support import TESTS

TOKENS_PER_WORD = 4 / 3

# Shares of the documents that have at most so many words.
SHARES = (0, 0.01, *(percent / 100 for percent in range(5, 100, 5)), 0.99)

WORDS: dict[str, list[int]] = json.loads((TESTS / "data" / "words_per_document.json").read_text())
"""Of each corpus, the number of words at each of `SHARES`."""


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
