"""A node's readers, without the reading: they declare plans, take shards at a modest pace and give them back.

`python -m benchmarks.node.crowd TASK` prints a line once all of them are at it, and ends with its input.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.programs.raw_session import RawSession

EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """Figures of all of them together.

    Attributes:
        jobs, readers: so many jobs, each of which goes through the dataset with so many readers.
    """

    socket: str  # of the daemon
    shards: str  # a file with the dataset's rows, see `ShardRef.to_json`
    jobs: int
    readers: int
    shard_s: float  # how long a reader takes for a shard, on average

    def to_json(self) -> str:
        """Return the task as one argument."""
        return json.dumps(asdict(self))


def main() -> None:
    """Run them all, each in a thread of its own."""
    task, stop = Task(**json.loads(sys.argv[1])), threading.Event()
    rows = json.loads(Path(task.shards).read_text())
    ready = threading.Barrier(task.jobs * task.readers + 1)
    threads = [
        threading.Thread(target=_read, args=(task, f"job-{job}", rows[number :: task.readers], ready, stop))
        for job in range(task.jobs)
        for number in range(task.readers)
    ]
    for thread in threads:
        thread.start()
    ready.wait()
    print("ready", flush=True)
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


def _read(task: Task, job: str, rows: Sequence[Any], ready: threading.Barrier, stop: threading.Event) -> None:
    """Go through a part of the dataset, each epoch in another order."""
    source = random.Random(f"{job} {rows[0]}")
    order = [index for _ in range(EPOCHS) for index in source.sample(range(len(rows)), len(rows))]
    with RawSession(Path(task.socket), job) as session:
        session.ask("plan", epoch=0, shards=rows, order=order, reads=len(rows))
        ready.wait()
        for position in range(len(order)):
            lease = session.take(position)["lease"]
            if stop.wait(task.shard_s * source.uniform(0.5, 1.5)):
                return
            session.send(type="release", lease=lease)


if __name__ == "__main__":
    main()
