"""Blocks of tokens for a language model, read by one process, next to litdata's and MosaicML's.

Per second of CPU, as MosaicML's reader often sleeps. Ours and litdata's are cut from documents when
they are read; MosaicML's were packed when they were written. All read local files in random order.
"""

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.measure import Row, Target, call, compared, rate
from benchmarks.workplace import Workplace

LENGTH = 2_048
DOCUMENTS = 40_000
LONGEST = 3_000
_SHARD_BYTES = 32 * 1024**2
_TIMED_S = 4.0


def measure(place: Workplace) -> list[Row]:
    """Return millions of tokens per second of CPU, medians of interleaved rounds."""
    sources = _write(place)
    what = f"shuffled blocks of {LENGTH:,}, one process"
    with place.warmed(sources["shardcache"]) as daemon:
        contenders = {
            name: partial(
                call,
                million_tokens_per_cpu_s,
                contender=name,
                source=source,
                socket=str(daemon.socket),
            )
            for name, source in sources.items()
        }
        return compared(
            contenders,
            place.say,
            place.rounds,
            "million tokens/CPU-s",
            what,
            {"litdata": Target("≥", 1.0)},
        )


def _write(place: Workplace) -> dict[str, str]:
    """Write the same documents in every contender's format; return where each finds its own."""
    place.say("making documents")
    root = place.root / "tokens"
    source = np.random.default_rng(0)
    lengths = source.integers(100, LONGEST, max(1, round(DOCUMENTS * place.scale)))
    documents = [source.integers(0, 50_000, length, dtype=np.uint16) for length in lengths]
    root.mkdir()
    _write_ours(root / "shardcache", documents)
    _write_litdata(root / "litdata", documents)
    tokens = np.concatenate(documents)
    blocks = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    peers.write_mosaicml(
        root / "mosaicml", columns, ({"tokens": block} for block in blocks), size_limit=_SHARD_BYTES
    )
    ours = f"file://{root}/shardcache/index.json"
    return {
        "shardcache": ours,
        "litdata": str(root / "litdata"),
        "mosaicml": str(root / "mosaicml"),
    }


def _write_ours(folder: Path, documents: Iterable[Any]) -> None:
    from shardcache.writing import ShardWriter

    with ShardWriter(folder, shard_size_bytes=_SHARD_BYTES, tokens="tok:uint16") as shards:
        for number, tokens in enumerate(documents):
            shards.write({"__key__": f"{number:09d}", "tok": tokens.tobytes()})


def _write_litdata(folder: Path, documents: Iterable[Any]) -> None:
    import torch
    from litdata import TokensLoader

    peers.write_litdata(
        folder,
        map(torch.from_numpy, documents),
        chunk_bytes=_SHARD_BYTES,
        item_loader=TokensLoader(),
    )


def million_tokens_per_cpu_s(contender: str, source: str, socket: str) -> float:
    dataset = _dataset(contender, source, socket)

    def read() -> int:
        return sum(1 for _ in dataset)

    return rate(read, read(), _TIMED_S, time.process_time) * LENGTH / 1e6


def _dataset(contender: str, source: str, socket: str) -> Any:
    if contender == "litdata":
        from litdata import TokensLoader

        return peers.litdata(source, item_loader=TokensLoader(block_size=LENGTH), shuffle=True)
    if contender == "mosaicml":
        return peers.mosaicml().StreamingDataset(
            local=source, shuffle=True, batch_size=8, predownload=100_000
        )
    from shardcache_client.dataset import ShardDataset
    from shardcache_client.samples.token_blocks import TokenBlocks

    return ShardDataset(
        source,
        shuffle=True,
        tokens=TokenBlocks(LENGTH, member="tok", dtype="uint16"),
        socket=socket,
    )
