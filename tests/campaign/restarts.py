"""The daemon is killed, stopped and frozen at any moment, while jobs read: every epoch gives the same samples."""

import json
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
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
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
# Room for what is in hand and a little more: every epoch needs the daemon, and most of it the store.
CAPACITY = "4MB"
FLAGS = ("--part-size", "65536", "--shard-connections", "2")
# Without disturbance at most, unless a start of the daemon takes longer: else a slow machine gives jobs no time.
LONGEST_CALM_S = 0.8
LONGEST_FREEZE_S = 1.5
# Longer than any recovery on a busy machine; what takes longer does not come.
HANG_S = 90.0
# Workers look every 5 s whether their job still runs.
_ORPHANED_S = 20.0
# A reader that had nothing to read for so long when the daemon was ready again waited for it.
_DRY_S = 0.3
# So much later than the daemon itself may we notice that it is ready.
_NOTICED_S = 0.1

_JOB = """
import json, os, sys, threading, zlib
from itertools import count
from torch.utils.data import DataLoader
from shardcache_client import ShardDataset

def end_with_input():
    # Whoever disturbs this job may be killed itself; and in the middle of an epoch there is nothing to tidy up.
    os.read(0, 1)  # not sys.stdin: a forked worker closes that, and would wait for this thread's lock on it
    os._exit(0)

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


class WatchedJob:
    """A job in a process of its own, of which each epoch is compared; a context manager.

    Args:
        expected: what the epochs are to be; None for a job of `PERIOD` epochs that finds that out.
    """

    def __init__(self, socket: Path, shape: Shape, expected: list[Epoch] | None = None) -> None:
        self.epochs: list[Epoch] = []
        options = {**shape.options, "timeout_s": 120, "socket": str(socket)}
        self._task = json.dumps([shape.workers, PERIOD, 0 if expected else PERIOD, options])
        self._expected = expected
        self._result = Result("undisturbed")
        self._current: Epoch = []
        self._arrivals_s: list[float] = []
        self._whole = 0
        self._ended = False
        self._moved = threading.Condition()

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
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(HANG_S)
        self._watching.join(_ORPHANED_S)
        if self._watching.is_alive():
            # A worker that was being started when the job ended notices nothing of that, and keeps the pipe open.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._watching.join()
        self._process.stdout.close()
        self._log.close()

    def wait(self) -> list[Epoch]:
        """Return the epochs of a job that ends. Raises RuntimeError with the end of its log if it fails."""
        if self._process.wait(HANG_S):
            raise RuntimeError(self._tail())
        self._watching.join()
        return self.epochs

    def report_to(self, result: Result) -> None:
        """Count what goes wrong from now on there; once a sample has come, which is when the job runs."""
        with self._moved:
            self._result = result
            if self._ended:
                result.fail("lost", "the job had ended before")
            elif not self._moved.wait_for(lambda: self._arrivals_s or self._ended, HANG_S):
                result.fail("hangs", f"the job gave no sample within {HANG_S:g} s")

    def recovery_s(self, ready_s: float, result: Result) -> float | None:
        """Return how long after the daemon was ready a sample came to a reader that had none; None where one had."""
        begin_s = ready_s - _NOTICED_S
        with self._moved:
            if not self._moved.wait_for(lambda: self._ended or self._arrivals_s[-1] > begin_s, HANG_S):
                result.fail("hangs", f"no sample within {HANG_S:g} s of a daemon that is ready")
            if self._ended or self._arrivals_s[-1] <= begin_s:
                return None
            first = bisect_right(self._arrivals_s, begin_s)
            waited = first > 0 and self._arrivals_s[first - 1] < ready_s - _DRY_S
            return max(0.0, self._arrivals_s[first] - ready_s) if waited else None

    def finish_epoch(self, result: Result) -> None:
        """Wait until the present epoch, and so all of it, was compared."""
        with self._moved:
            wanted = self._whole + 1
            if not self._moved.wait_for(lambda: self._ended or self._whole >= wanted, HANG_S):
                result.fail("hangs", f"an epoch did not end within {HANG_S:g} s")

    def _watch(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            key, number = line.split()
            with self._moved:
                if key == "epoch":
                    self._compare(int(number))
                else:
                    self._arrivals_s.append(time.monotonic())
                    self._current.append((key, int(number)))
                self._moved.notify_all()
        status = self._process.wait()
        with self._moved:
            self._ended = True
            if status:
                story = self._tail()
                self._result.fail("lost" if "shardcache.errors." in story else "untyped", f"the job ended:\n{story}")
            self._moved.notify_all()

    def _compare(self, number: int) -> None:
        read, self._current = self._current, []
        self._whole += 1
        if self._expected is None:
            self.epochs.append(read)
        else:
            compare(self._result, f"epoch {number}", read, self._expected[number])

    def _tail(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def compare(result: Result, how: str, read: list[Any], expected: list[Any]) -> None:
    """Count samples with a key and a content that are not those expected, in their order."""
    if read != expected:
        at = next((i for i, (a, b) in enumerate(zip(read, expected, strict=False)) if a != b), len(read))
        story = f"{how}: {len(read)} samples of {len(expected)}, which differ from number {at} on"
        result.fail("wrong" if set(read) - set(expected) else "lost", f"{story}: {read[at : at + 1]!r:.200}")


class Ground:
    """A throttled store, a daemon, and the job that reads: one for each shape, started when a row first needs it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._samples = write_shards(folder / "store" / "bucket")
        store = ThrottledS3(folder / "store", first_byte_s=0.005, connection_bytes_per_s=20e6)
        self.env = stack.enter_context(store).env()
        (folder / "d").mkdir()
        self.daemon = stack.enter_context(Daemon(folder / "d", *FLAGS, capacity=CAPACITY, env=self.env))
        self._job = stack.enter_context(ExitStack())
        self._shape: Shape | None = None

    def job(self, shape: Shape) -> WatchedJob:
        """Return the job of a shape; that of another shape ends. Raises RuntimeError if an undisturbed one is wrong."""
        if shape is not self._shape:
            self._job.close()
            self._shape = shape
            with WatchedJob(self.daemon.socket, shape) as job:
                epochs = job.wait()
            if len(epochs) != PERIOD or any(sorted(epoch) != sorted(self._samples) for epoch in epochs):
                raise RuntimeError("an undisturbed job does not read each sample once")
            self._watched = self._job.enter_context(WatchedJob(self.daemon.socket, shape, epochs))
        return self._watched


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


def relieve(daemon: Daemon, rng: random.Random) -> int:
    """Have it drain, and start the next one in the middle of that."""
    before = daemon.let_go()
    before.terminate()
    time.sleep(rng.random() * 0.5)
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


def disturbed(shape: Shape, disturb: Disturb, times: int, ground: Ground, result: Result, scale: float) -> None:
    """Disturb the daemon while the job reads, and compare all that it reads; three times in four see it continue."""
    rng = random.Random(f"{SEED}, {result.fault}")
    job = ground.job(shape)
    job.report_to(result)
    calm_s = LONGEST_CALM_S
    for _ in range(scaled(times, scale)):
        time.sleep(rng.random() ** 2 * calm_s)
        begun_s = time.monotonic()
        if status := disturb(ground.daemon, rng):
            result.fail("untyped", f"exit status {status} after SIGTERM")
        ready_s = time.monotonic()
        result.injected += 1
        if rng.random() < 0.75 and (recovery_s := job.recovery_s(ready_s, result)) is not None:
            result.recovery_s.append(recovery_s)
        calm_s = max(LONGEST_CALM_S, ready_s - begun_s)
    job.finish_epoch(result)


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
