"""Blocks of tokens for a language model, read by one process: ours next to litdata's and MosaicML's.

Per second of CPU, as MosaicML's reader often sleeps. Ours and litdata's are cut from documents when they are read;
MosaicML's were packed when they were written. All read local files in random order.

python -m benchmarks.reading.tokens '{"contender": "litdata", "source": "…", …}': one contender, a process.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.daemon import Daemon
from benchmarks.measure import medians, python, run
from benchmarks.reading.decoded import hide_torchvision
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

LENGTH, DOCUMENTS, LONGEST = 2_048, 40_000, 3_000
_SHARD_BYTES = 32 * 1024**2
_TIMED_S = 4.0


@dataclass(frozen=True, slots=True)
class Task:
    """One contender's input."""

    contender: str  # key of `CONTENDERS`
    source: str  # url of an index, or folder of chunks
    socket: str  # of the daemon, where the contender is ours


def measure(place: Workplace) -> list[Row]:
    """Return millions of tokens per second of CPU, medians of interleaved rounds."""
    sources = _write(place)
    with place.daemon() as daemon:
        daemon.warm(sources["shardcache"])
        rates = medians(_contenders(sources, daemon), lambda text: place.say(f"{text} Mtokens/s"), place.rounds)
    ours = rates.pop("shardcache")
    what = f"million tokens per second of CPU, shuffled blocks of {LENGTH:,}, one process"
    return [
        Row("tokens", what, ours, peer, rate, Target("≥", 1.0) if peer == "litdata" else None)
        for peer, rate in rates.items()
    ]


def _contenders(sources: dict[str, str], daemon: Daemon) -> dict[str, Callable[[], float]]:
    def rate(contender: str) -> float:
        task = Task(contender, sources[contender], str(daemon.socket))
        return round(float(run(python("reading.tokens", json.dumps(asdict(task)))).output.splitlines()[-1]))

    return {name: partial(rate, name) for name in sources}


def _write(place: Workplace) -> dict[str, str]:
    """Write the same documents in every contender's format; return where each finds its own."""
    place.say("making documents")
    root = place.root / "tokens"
    folders = {name: root / name for name in CONTENDERS}
    if not root.exists():
        source = np.random.default_rng(0)
        lengths = source.integers(100, LONGEST, max(1, round(DOCUMENTS * place.scale)))
        documents = [source.integers(0, 50_000, length, dtype=np.uint16) for length in lengths]
        root.mkdir()
        _write_ours(folders["shardcache"], documents)
        with redirect_stdout(io.StringIO()):
            _write_litdata(folders["litdata"], documents)
            _write_mosaicml(folders["mosaicml"], documents)
    return {name: str(folder) for name, folder in folders.items()} | {
        "shardcache": f"file://{folders['shardcache']}/index.json"
    }


def _write_ours(folder: Path, documents: Iterable[Any]) -> None:
    from shardcache.writing import ShardWriter

    with ShardWriter(folder, shard_size_bytes=_SHARD_BYTES, tokens="tok:uint16") as shards:
        for number, tokens in enumerate(documents):
            shards.write({"__key__": f"{number:09d}", "tok": tokens.tobytes()})


def _write_litdata(folder: Path, documents: Iterable[Any]) -> None:
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes=_SHARD_BYTES, item_loader=TokensLoader())
    for number, tokens in enumerate(documents):
        writer.add_item(number, torch.from_numpy(tokens))
    writer.done()
    writer.merge()


def _write_mosaicml(folder: Path, documents: Sequence[Any]) -> None:
    hide_torchvision()
    from streaming import MDSWriter

    tokens = np.concatenate(documents)
    blocks = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=_SHARD_BYTES) as writer:
        for block in blocks:
            writer.write({"tokens": block})


def shardcache(task: Task) -> Any:
    """Our dataset."""
    from shardcache_client import ShardDataset, TokenBlocks

    tokens = TokenBlocks(LENGTH, member="tok", dtype="uint16")
    return ShardDataset(task.source, shuffle=True, tokens=tokens, socket=task.socket)


def litdata(task: Task) -> Any:
    """litdata over its chunks in a local folder."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    from litdata import StreamingDataset, TokensLoader

    return StreamingDataset(task.source, item_loader=TokensLoader(block_size=LENGTH), shuffle=True)


def mosaicml(task: Task) -> Any:
    """MosaicML's streaming over its shards in a local folder."""
    hide_torchvision()
    from streaming import StreamingDataset

    return StreamingDataset(local=task.source, shuffle=True, batch_size=8, predownload=100_000)


CONTENDERS = {contender.__name__: contender for contender in (shardcache, litdata, mosaicml)}


def million_tokens_per_cpu_s(task: Task) -> float:
    """Read an epoch unmeasured, then whole epochs for a while."""
    dataset = CONTENDERS[task.contender](task)
    expected = sum(1 for _ in dataset)
    blocks, started_s = 0, time.process_time()
    while (elapsed_s := time.process_time() - started_s) < _TIMED_S:
        blocks += sum(1 for _ in dataset)
    if not expected or blocks % expected:
        raise RuntimeError(f"{task.contender} gave {blocks} blocks, no multiple of {expected}")
    return blocks * LENGTH / elapsed_s / 1e6


if __name__ == "__main__":
    print(million_tokens_per_cpu_s(Task(**json.loads(sys.argv[1]))))
