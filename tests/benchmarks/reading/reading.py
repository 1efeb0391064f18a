"""One contender reads a dataset in a process of its own; prints samples a second, or its memory, as JSON.

python -m benchmarks.reading.reading '{"contender": "webdataset", "source": "…", …}'
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Sample = Mapping[str, Any]
Epoch = Callable[[], Iterable[Sample]]

# Short epochs are repeated until this much was timed.
_TIMED_S = 1.5
_READ_BYTES = 1024 * 1024
_LOOK_EVERY = 50  # samples


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a contender.

    Attributes:
        samples, payload_bytes: what one epoch must give.
        as_bytes: read each field whole, into `bytes`, as whoever decodes it must; else leave alone what is handed out.
    """

    contender: str  # key of `CONTENDERS`
    source: str  # url, or folder of tars or chunks
    extensions: tuple[str, ...]  # fields that hold bytes
    samples: int
    payload_bytes: int
    as_bytes: bool
    socket: str = ""  # of the daemon, where the contender is ours
    window: int = 0  # of how many shards the samples are mixed, where the contender is ours; 0 does not shuffle
    measure: str = "samples_per_s"  # key of `MEASURES`

    def to_json(self) -> str:
        """Return the command-line argument."""
        return json.dumps(asdict(self))


def shardcache(task: Task) -> Epoch:
    """Our dataset over a warm cache."""
    from shardcache_client import ShardDataset

    dataset = ShardDataset(task.source, socket=task.socket, shuffle=task.window > 0, shuffle_window=task.window)
    return lambda: dataset


def litdata(task: Task) -> Epoch:
    """litdata over its own chunks in a local folder."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    from litdata import StreamingDataset

    dataset = StreamingDataset(task.source)
    return lambda: dataset


def webdataset(task: Task) -> Epoch:
    """webdataset over local tars, as they were written."""
    from webdataset import WebDataset

    dataset = WebDataset(sorted(map(str, Path(task.source).glob("*.tar"))), shardshuffle=False)
    return lambda: dataset


CONTENDERS = {contender.__name__: contender for contender in (shardcache, litdata, webdataset)}
PLAIN_READS = "plain 1 MiB reads"


def samples_per_s(task: Task) -> float:
    """Read an epoch unmeasured and checked, then whole epochs for a while."""
    if task.contender == PLAIN_READS:
        return _plain_reads_per_s(task)
    epoch = CONTENDERS[task.contender](task)
    _check(task, epoch())
    read = _read_as_bytes if task.as_bytes else _read
    return _timed(lambda: read(epoch(), task.extensions))


def anonymous_bytes(task: Task) -> float:
    """Return the most memory, pages of files left out, that the process has in one epoch, after another."""
    epoch = CONTENDERS[task.contender](task)
    _read(epoch(), task.extensions)
    return max(_anonymous_bytes() for number, _ in enumerate(epoch()) if number % _LOOK_EVERY == 0)


MEASURES = {measure.__name__: measure for measure in (samples_per_s, anonymous_bytes)}


def _plain_reads_per_s(task: Task) -> float:
    """Read the tars with plain system calls, into one buffer, without looking at them."""
    paths = sorted(Path(task.source).glob("*.tar"))
    buffer = bytearray(_READ_BYTES)

    def read() -> int:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return task.samples

    read()
    return _timed(read)


def _anonymous_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _timed(read: Callable[[], int]) -> float:
    samples, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < _TIMED_S:
        samples += read()
    return samples / elapsed_s


def _read(samples: Iterable[Sample], _extensions: tuple[str, ...]) -> int:
    count = 0
    for _ in samples:
        count += 1
    return count


def _read_as_bytes(samples: Iterable[Sample], extensions: tuple[str, ...]) -> int:
    count = 0
    for sample in samples:
        for extension in extensions:
            bytes(sample[extension])  # costs nothing where it is `bytes` already
        count += 1
    return count


def _check(task: Task, samples: Iterable[Sample]) -> None:
    keys, payload_bytes = set(), 0
    for sample in samples:
        keys.add(sample["__key__"])
        payload_bytes += sum(len(sample[extension]) for extension in task.extensions)
    if (len(keys), payload_bytes) != (task.samples, task.payload_bytes):
        raise RuntimeError(
            f"{task.contender} gave {len(keys)} samples of {payload_bytes} bytes, "
            f"the dataset has {task.samples} of {task.payload_bytes}"
        )


def main() -> None:
    """Read what the argument says."""
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps({task.measure: MEASURES[task.measure](task)}))


if __name__ == "__main__":
    main()
