"""Two shuffled jobs on a cache of half the dataset, next to the best that any cache could have fetched.

The cache has room for half the dataset and for the shard that each reader holds in its hands. Offline MIN (Belady,
A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966) gets all of that
room and the very sequence of reads that happened: the order in which the workers of both jobs came to the first
sample of each shard. It may evict what a reader still holds, which no real cache may; the other row has it obey.

Shards are shuffled, but their samples not mixed. Thus a read is one event, and a reader holds one shard. With a window
it would hold many, each from its first sample to its last, none of which MIN could evict: the figure would tell how
wide the window is, and not how well the cache decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.caching.policies import next_reads
from benchmarks.data import Kind
from benchmarks.downloads.cold import course_of
from benchmarks.measure import python, run_together
from benchmarks.reading.training import WORKERS, Task
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace

JOBS = 2
EPOCHS = 6
SAMPLES_PER_S = 1000.0
SHARDS = 100

_SHARD_BYTES = 10_000_000
# The second job comes when the first is this far into its first epoch.
_STAGGER_EPOCHS = 0.4


@dataclass(frozen=True, slots=True)
class Read:
    """A reader began to read a shard."""

    at_s: float
    reader: str
    url: str


def measure(place: Workplace) -> list[Row]:
    """Return the bytes that the store sent and the share of what was read that it did not send, from one run."""
    # The number of shards decides what MIN can do, so the scale changes their size.
    kind = Kind("half", "100 KB", (("jpg", 100_000),), SHARDS * _SHARD_BYTES, round(_SHARD_BYTES * place.scale))
    dataset = place.dataset(kind)
    shard_bytes = dataset.tar_bytes // len(dataset.shards)
    room = len(dataset.shards) // 2 + JOBS * WORKERS
    with place.far_store(dataset) as store, place.folder() as folder:
        # The half shard is for what the cache keeps next to the tars, and too small for one more of them.
        with place.daemon(f"{int((room + 0.5) * shard_bytes)}", store) as daemon:
            task = Task(
                contender="shardcache",
                source=f"s3://{dataset.folder.name}/{dataset.names}",
                samples=dataset.samples,
                sample_bytes=kind.sample_bytes,
                samples_per_s=SAMPLES_PER_S,
                epochs=EPOCHS,
                socket=str(daemon.socket),
                reads=str(folder / "reads"),
            )
            courses = [course_of(output) for output in run_together([_command(task, number) for number in range(JOBS)])]
            store_bytes = store.stats().sent_bytes
        reads = read_log(folder / "reads")
    for number, course in enumerate(courses):
        place.say(f"job {number}: {course}")
    return _rows(reads, room, shard_bytes, store_bytes)


def _rows(reads: Sequence[Read], room: int, shard_bytes: int, store_bytes: int) -> list[Row]:
    best, obedient = (min_misses(reads, room, spare_held=held) * shard_bytes for held in (False, True))
    what, all_bytes = f"MB from the store, {JOBS} jobs × {EPOCHS} epochs", len(reads) * shard_bytes

    def hits(fetched_bytes: int) -> float:
        return 1e2 * (1 - fetched_bytes / all_bytes)

    return [
        Row("half cache", what, store_bytes / 1e6, "offline MIN", best / 1e6, Target("≤", 1.03)),
        Row("half cache", what, store_bytes / 1e6, "MIN sparing what is held", obedient / 1e6),
        Row("half cache", "% of the bytes read from the cache", hits(store_bytes), "offline MIN", hits(best)),
    ]


def _command(task: Task, number: int) -> list[str]:
    epoch_s = task.samples / task.samples_per_s
    mine = replace(task, job=f"job-{number}", seed=number, start_after_s=number * _STAGGER_EPOCHS * epoch_s)
    return python("reading.training", mine.to_json())


def read_log(path: Path) -> list[Read]:
    """Return what `training.Logged` wrote, by time."""
    lines = (line.split(" ") for line in path.read_text().splitlines())
    return sorted((Read(float(at_s), reader, url) for at_s, reader, url in lines), key=lambda read: read.at_s)


def min_misses(reads: Sequence[Read], room: int, *, spare_held: bool) -> int:
    """Return how often MIN fetches: it evicts what is read again last, or never.

    Args:
        reads: all of them, by time.
        room: how many shards fit, which are of one size.
        spare_held: never evict the shard that another reader began last, as a real cache must not.
    """
    next_read = next_reads([read.url for read in reads])
    cached: dict[str, int] = {}
    held: dict[str, str] = {}
    misses = 0
    for number, read in enumerate(reads):
        held[read.reader] = read.url
        if read.url not in cached:
            misses += 1
            if len(cached) == room:
                victims = cached.keys() - held.values() if spare_held else cached.keys()
                del cached[max(victims, key=cached.__getitem__)]
        cached[read.url] = next_read[number]
    return misses
