"""Daemons killed, stopped and frozen while jobs read: every epoch gives the same samples."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Self

from campaign.harness import Result, Row, scaled
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, random_samples
from support.stores.throttled_s3 import ThrottledS3

SEED = 5
SHARDS = 36
SAMPLES = 16
MEMBER = "bin"
MEMBER_BYTES = 8 * 1024
PERIOD = 3
"""Epochs that differ; those after them are the same again."""
# Room for what is in hand and a little more: every epoch needs the daemon, and most of it the
# store.
CAPACITY = "4MB"
FLAGS = ("--part-size", "65536", "--shard-connections", "2")
# Samples between two disturbances: so many at most.
LONGEST_CALM = 400
LONGEST_FREEZE_S = 1.5
# Longer than any recovery on a busy machine; what takes longer does not come.
HANG_S = 90.0
# A reader that had nothing to read for so long when the daemon was ready again waited for it.
_DRY_S = 0.3
_JOB = """
import json, os, sys, threading, zlib
from itertools import count
from torch.utils.data import DataLoader
from shardcache_client import ShardDataset

def end_with_input():
    # Not sys.stdin: a forked worker closes that, and would wait for this thread's lock on it.
    os.read(0, 1)
    os._exit(0)

# Whoever disturbs this job may be killed itself.
threading.Thread(target=end_with_input, daemon=True).start()
workers, period, epochs, options = json.loads(sys.argv[1])
dataset = ShardDataset("s3://bucket/index.json", **options)
samples = DataLoader(dataset, batch_size=None, num_workers=workers) if workers else dataset
for epoch in range(epochs) if epochs else count():
    dataset.set_epoch(epoch % period)
    for sample in samples:
        print(sample["__key__"], zlib.crc32(sample["bin"]), flush=True)
    print("epoch", epoch % period, flush=True)
"""

Epoch = list[tuple[str, int]]
"""Keys and checksums, in order."""


class Shape(NamedTuple):
    """A job: so many workers, and how they read."""

    name: str
    workers: int
    options: dict[str, object]


SHUFFLED = Shape("3 workers, shuffled", 3, {"shuffle": True, "shuffle_window": 3, "seed": SEED})
ARRIVING = Shape("reading what arrives", 0, {"partial_reads": True})


class Job:
    """A job in a process of its own; a context manager. `epochs`: 0 for ever more."""

    def __init__(self, socket: Path, shape: Shape, epochs: int = 0) -> None:
        options = {**shape.options, "timeout_s": 120, "socket": str(socket)}
        self._task = json.dumps([shape.workers, PERIOD, epochs, options])
        self._printed: SimpleQueue[tuple[float, str]] = SimpleQueue()

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _JOB, self._task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._process, self._log:
            with suppress(ProcessLookupError):  # it has ended, and its workers as well
                os.killpg(self._process.pid, signal.SIGKILL)
            self._listening.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._printed.put((time.monotonic(), line))
        self._printed.put((time.monotonic(), ""))

    def samples(self) -> Iterator[tuple[float, str, int]]:
        """Yield when each sample came, its key and its checksum; at the end of an epoch "epoch" and
        its number.

        Raises queue.Empty if none comes for `HANG_S`, and RuntimeError with the end of its log if
        the job fails.
        """
        while True:
            at_s, line = self._printed.get(timeout=HANG_S)
            if line:
                key, number = line.split()
                yield at_s, key, int(number)
            elif self._process.wait(HANG_S):
                self._log.seek(0)
                raise RuntimeError("".join(self._log.readlines()[-30:]))
            else:
                return


def compare(result: Result, how: str, read: list[Any], expected: list[Any]) -> None:
    """Count samples with a key and a content that are not those expected, in their order."""
    if read != expected:
        at = next(
            (i for i, (a, b) in enumerate(zip(read, expected, strict=False)) if a != b), len(read)
        )
        story = f"{how}: {len(read)} samples of {len(expected)}, which differ from number {at} on"
        result.fail(
            "wrong" if set(read) - set(expected) else "lost", f"{story}: {read[at : at + 1]!r:.200}"
        )


class Ground:
    """A throttled store, a daemon, and a job for each shape, started when a row first needs it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._samples = write_shards(folder / "store" / "bucket")
        store = ThrottledS3(folder / "store", first_byte_s=0.005, connection_bytes_per_s=20e6)
        self.env = stack.enter_context(store).env()
        (folder / "d").mkdir()
        self.daemon = stack.enter_context(
            Daemon(folder / "d", *FLAGS, capacity=CAPACITY, env=self.env)
        )
        self._jobs = stack.enter_context(ExitStack())
        self._shape: Shape | None = None

    def job(self, shape: Shape) -> Job:
        """Return the job of a shape, and end another's. Raises RuntimeError."""
        if shape is not self._shape:
            self.end_job()
            self.epochs: list[Epoch] = [[]]  # as an undisturbed job reads them
            with Job(self.daemon.socket, shape, PERIOD) as job:
                for _, key, number in job.samples():
                    if key == "epoch":
                        self.epochs.append([])
                    else:
                        self.epochs[-1].append((key, number))
            if self.epochs.pop() or any(
                sorted(epoch) != sorted(self._samples) for epoch in self.epochs
            ):
                raise RuntimeError("an undisturbed job does not read each sample once")
            self._job = self._jobs.enter_context(Job(self.daemon.socket, shape))
            self._shape = shape
        return self._job

    def end_job(self) -> None:
        self._jobs.close()
        self._shape = None


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(folder, stack)


def write_shards(folder: Path) -> Epoch:
    """Write the shards and their index, so that no order depends on what was read."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(SHARDS):
        (folder / f"{number:03d}.tar").write_bytes(make_tar(_samples(number)))
        rows.append({"url": f"{number:03d}.tar", "nsamples": SAMPLES})
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return [each for number in range(SHARDS) for each in packed(number)]


def _samples(number: int) -> list[Any]:
    return random_samples(SAMPLES, {MEMBER: MEMBER_BYTES}, seed=number, first=number * SAMPLES)


def packed(shard: int) -> Epoch:
    return [(sample["__key__"], zlib.crc32(sample[MEMBER])) for sample in _samples(shard)]


Disturb = Callable[[Daemon, random.Random], int]
"""Does it, has the daemon ready again, and returns the exit status after SIGTERM."""


def kill(daemon: Daemon, _rng: random.Random) -> int:
    daemon.restart()
    return 0


def stop(daemon: Daemon, _rng: random.Random) -> int:
    status = daemon.stop()
    daemon.start()
    return status


def relieve(daemon: Daemon, _rng: random.Random) -> int:
    """Have it drain, and start the next one in the middle of that."""
    before = daemon.let_go()
    before.terminate()
    daemon.start()
    return before.wait()


def lose(daemon: Daemon, _rng: random.Random) -> int:
    daemon.kill()
    shutil.rmtree(daemon.cache_dir)
    daemon.start()
    return 0


def freeze(daemon: Daemon, rng: random.Random) -> int:
    daemon.pause()
    stat = Path(f"/proc/{daemon.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(rng.random() * LONGEST_FREEZE_S)
    daemon.go_on()
    return 0


def disturbed(
    shape: Shape, disturb: Disturb, times: int, ground: Ground, result: Result, scale: float
) -> None:
    """Disturb the daemon while the job reads, and compare all that it reads."""
    try:
        _disturb(ground.job(shape), disturb, scaled(times, scale), ground, result)
    except Empty:
        result.fail("hangs", f"no sample within {HANG_S:g} s")
        ground.end_job()
    except RuntimeError as exn:
        result.fail(
            "lost" if "shardcache.errors." in str(exn) else "untyped", f"the job ended:\n{exn}"
        )
        ground.end_job()


def _disturb(job: Job, disturb: Disturb, times: int, ground: Ground, result: Result) -> None:
    """Disturb the daemon so many times, each after some samples, and read the epoch to its end."""
    rng = random.Random(f"{SEED}, {result.fault}")
    read: Epoch = []
    calm = 1
    former_s = 0.0
    ready_s = math.inf
    for at_s, key, number in job.samples():
        if key == "epoch":
            compare(result, f"epoch {number}", read, ground.epochs[number])
            if result.injected == times:
                return
            read = []
            continue
        read.append((key, number))
        if at_s > ready_s:
            if former_s < ready_s - _DRY_S:
                result.recovery_s.append(at_s - ready_s)
            ready_s = math.inf
        former_s = at_s
        calm = calm - 1
        if calm <= 0 and result.injected < times:
            if status := disturb(ground.daemon, rng):
                result.fail("untyped", f"exit status {status} after SIGTERM")
            result.injected += 1
            ready_s = time.monotonic()
            calm = round(rng.random() ** 2 * LONGEST_CALM)


ROWS = tuple(
    Row(f"{name} ({shape.name})", partial(disturbed, shape, disturb, times), slow=True)
    for shape, name, disturb, times in (
        (SHUFFLED, "SIGKILL", kill, 90),
        (SHUFFLED, "SIGTERM", stop, 70),
        (SHUFFLED, "SIGTERM, the next at once", relieve, 30),
        (SHUFFLED, "SIGKILL and the cache lost", lose, 20),
        (SHUFFLED, "SIGSTOP for up to 1.5 s", freeze, 60),
        (ARRIVING, "SIGKILL", kill, 60),
        (ARRIVING, "SIGTERM", stop, 30),
    )
)
