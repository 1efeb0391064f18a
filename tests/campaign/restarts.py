"""The daemon is killed, stopped and frozen at any moment, while jobs read: every epoch gives the same samples."""

from __future__ import annotations

import json
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from campaign.harness import Result, Row, scaled
from campaign.restarts_job import MEMBER, Task
from campaign.restarts_watched import WatchedJob, expected_epochs
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, random_samples
from support.stores.throttled_s3 import ThrottledS3

SEED = 5
SHARDS = 36
SAMPLES = 16
MEMBER_BYTES = 8 * 1024
PERIOD = 3
# Room for what is in hand and a little more: every epoch needs the daemon, and most of it the store.
CAPACITY = "4MB"
FLAGS = ("--part-size", "65536", "--shard-connections", "2")
# Without disturbance at most, unless a start of the daemon takes longer: else a slow machine gives jobs no time.
LONGEST_CALM_S = 0.8
LONGEST_FREEZE_S = 1.5


@dataclass(frozen=True, slots=True)
class Shape:
    """A job: so many workers, and how they read."""

    name: str
    workers: int
    options: dict[str, object] = field(default_factory=dict)


SHUFFLED = Shape("3 workers, shuffled", 3, {"shuffle": True, "shuffle_window": 3, "seed": SEED})
ARRIVING = Shape("reading what arrives", 0, {"partial_reads": True})


Disturb = Callable[[Daemon, random.Random], str]


def kill(daemon: Daemon, rng: random.Random) -> str:
    """End it in the middle of anything."""
    daemon.kill()
    daemon.start()
    return ""


def stop(daemon: Daemon, rng: random.Random) -> str:
    """End it in good order."""
    status = daemon.stop()
    daemon.start()
    return f"exit status {status} after SIGTERM" if status else ""


def relieve(daemon: Daemon, rng: random.Random) -> str:
    """Have it drain, and start the next one in the middle of that."""
    before = daemon.let_go()
    before.terminate()
    time.sleep(rng.random() * 0.5)
    daemon.start()
    status = before.wait()
    return f"exit status {status} after SIGTERM" if status else ""


def lose(daemon: Daemon, rng: random.Random) -> str:
    """End it, and start the next one without its cache."""
    daemon.kill()
    shutil.rmtree(daemon.cache_dir)
    daemon.start()
    return ""


def freeze(daemon: Daemon, rng: random.Random) -> str:
    """Let it stand still for a while."""
    daemon.pause()
    stat = Path(f"/proc/{daemon.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    time.sleep(rng.random() * LONGEST_FREEZE_S)
    daemon.go_on()
    return ""


class Ground:
    """A throttled store, a daemon, and the job that reads: one for each shape, started when a row first needs it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._expected = write_shards(folder / "store" / "bucket")
        store = ThrottledS3(folder / "store", first_byte_s=0.005, connection_bytes_per_s=20e6)
        env = stack.enter_context(store).env()
        (folder / "d").mkdir()
        self.daemon = stack.enter_context(Daemon(folder / "d", *FLAGS, capacity=CAPACITY, env=env))
        self._job = stack.enter_context(ExitStack())
        self._shape: Shape | None = None

    def job(self, shape: Shape) -> WatchedJob:
        """Return the job of a shape; that of another shape ends."""
        if shape is not self._shape:
            self._job.close()
            self._shape = shape
            options = {**shape.options, "timeout_s": 120}
            calm = Task(str(self.daemon.socket), "s3://bucket/index.json", shape.workers, PERIOD, PERIOD, options)
            with WatchedJob(calm) as job:
                epochs = expected_epochs(job, self._expected, PERIOD)
            self._watched = self._job.enter_context(WatchedJob(calm.endless(), epochs))
        return self._watched


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Ground]:
    """Start the store and the daemon."""
    with ExitStack() as stack:
        yield Ground(folder, stack)


def disturbed(shape: Shape, disturb: Disturb, times: int, ground: Ground, result: Result, scale: float) -> None:
    """Disturb the daemon while the job reads, and compare all that it reads."""
    rng = random.Random(f"{SEED}, {result.fault}")
    job = ground.job(shape)
    job.report_to(result)
    calm_s = LONGEST_CALM_S
    for _ in range(scaled(times, scale)):
        time.sleep(rng.random() ** 2 * calm_s)
        calm_s = max(LONGEST_CALM_S, _once(ground.daemon, job, disturb, rng, result))
    job.finish_epoch(result)


def _once(daemon: Daemon, job: WatchedJob, disturb: Disturb, rng: random.Random, result: Result) -> float:
    """Disturb the daemon, three times in four see the job continue, and return how long the disturbance took in s."""
    begun_s = time.monotonic()
    complaint = disturb(daemon, rng)
    ready_s = time.monotonic()
    result.injected += 1
    if complaint:
        result.fail("untyped", complaint)
    if rng.random() < 0.75:
        recovery_s = job.recovery_s(ready_s, result)
        if recovery_s is not None:
            result.recovery_s.append(recovery_s)
    return ready_s - begun_s


def write_shards(folder: Path) -> dict[str, int]:
    """Write the shards and their index, so that no order depends on what was read; return checksums by key."""
    folder.mkdir(parents=True)
    checksums: dict[str, int] = {}
    for number in range(SHARDS):
        samples = random_samples(SAMPLES, {MEMBER: MEMBER_BYTES}, seed=number, first=number * SAMPLES)
        (folder / f"{number:03d}.tar").write_bytes(make_tar(samples))
        checksums |= {str(sample["__key__"]): zlib.crc32(sample[MEMBER]) for sample in samples}  # type: ignore[arg-type]
    rows = [{"url": f"{number:03d}.tar", "nsamples": SAMPLES} for number in range(SHARDS)]
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return checksums


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
