"""Shards of documents that are arrays of tokens, and the blocks that they have by definition."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from support.shards.tars import make_tar

Documents = Sequence[Sequence[int]]


def npy(tokens: Sequence[int], dtype: str = "uint16") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(tokens, dtype))
    return buffer.getvalue()


def token_tar(documents: Documents, *, extension: str = "npy", dtype: str | None = None, first: int = 0) -> bytes:
    """Return a tar with a sample for each document, keyed by its number from `first` on.

    Args:
        dtype: of plain arrays; None for .npy files of uint16.
    """
    pack = npy if dtype is None else lambda tokens: np.array(tokens, dtype).tobytes()
    return make_tar(
        {"__key__": f"{number:06d}", "txt": b"text", extension: pack(tokens)}
        for number, tokens in enumerate(documents, first)
    )


def write_token_shards(folder: Path, shards: Sequence[Documents]) -> str:
    """Write shards of .npy files and an index with the numbers of their tokens; return its url."""
    folder.mkdir()
    rows, first = [], 0
    for number, documents in enumerate(shards):
        (folder / f"{number}.tar").write_bytes(token_tar(documents, first=first))
        first += len(documents)
        tokens = sum(map(len, documents))
        rows.append({"url": f"{number}.tar", "nsamples": len(documents), "ntokens": tokens})
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return f"file://{folder}/index.json"


def blocks_of(
    documents: Documents, length: int, overlap: int = 0, end: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return tokens, and numbers of their documents, of each block of a shard: concatenate and cut."""
    ends = [] if end is None else [end]
    joined = [(token, number) for number, tokens in enumerate(documents) for token in [*tokens, *ends]]
    found = []
    while len(joined) >= length:
        block = joined[:length]
        order = list(dict.fromkeys(number for _, number in block))
        found.append(([token for token, _ in block], [order.index(number) for _, number in block]))
        joined = joined[length - overlap :]
    return found
