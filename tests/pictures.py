"""Takes the pictures for docs/: `cd tests && python -m pictures [FOLDER]`. Needs Chromium, 5 GB.

Four jobs go through a dataset that is larger than the cache, most of which was full before; the
rest comes from a store that is far away. Then a fifth job comes, and is faster than the network.
"""

import random
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.hollow_shards import make_hollow_shards
from shardcache.shared.protocol import ShardRef
from support.monitoring.chromium import Tab, chromium, opened
from support.network.ports import free_port
from support.programs.daemon import Daemon
from support.programs.raw_session import RawSession
from support.stores.throttled_s3 import ThrottledS3

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
STORE_BYTES_PER_S = 30e6
SHARD_BYTES = 64 * 1024 * 1024
SHARDS = 6_000
HERE = 4_500
CAPACITY = "350GB"
WATCHED_S = 75.0
STALLED_S = 6.0
URL = "s3://{}/train-{:06d}.tar"


@dataclass(frozen=True, slots=True)
class Job:
    """One that reads: so many readers, each of which takes so many seconds for a shard."""

    name: str
    readers: int
    shard_s: float
    bucket: str = "imagenet"
    shards: int = SHARDS  # of the dataset


JOBS = (
    Job("resnet-sweep-1", 4, 8.0),
    Job("resnet-sweep-2", 4, 11.0),
    Job("clip-pretrain", 8, 14.0),
    Job("dino", 2, 5.0),
)
LATECOMER = Job("video-pretrain", 8, 2.0, "kinetics")


@contextmanager
def reading(daemon: Daemon, here: Sequence[ShardRef], *jobs: Job) -> Iterator[None]:
    """Let jobs read until the block is left."""
    stop = threading.Event()
    readers = [
        threading.Thread(
            target=_read,
            args=(daemon, here if job.bucket == JOBS[0].bucket else (), job, number, stop),
        )
        for job in jobs
        for number in range(job.readers)
    ]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        stop.set()
        for reader in readers:
            reader.join()


def _read(
    daemon: Daemon, here: Sequence[ShardRef], job: Job, number: int, stop: threading.Event
) -> None:
    """Read a part of the dataset, so that what is needed first is cached."""
    rng = random.Random(f"{job.name}/{number}")
    shards = [
        *here,
        *(ShardRef(URL.format(job.bucket, index)) for index in range(len(here), job.shards)),
    ]
    first = [rng.choice(here) for _ in range(round(150 / job.shard_s))] if here else []
    part = first + rng.sample(shards, len(shards))[number :: job.readers]
    with RawSession(daemon, job.name) as session:
        session.plan(part, list(range(len(part))))
        for position in range(len(part)):
            granted = session.take(position)
            if granted["type"] == "error" or stop.wait(job.shard_s * rng.uniform(0.7, 1.3)):
                return
            session.send(type="release", lease=granted["lease"])


def main() -> None:
    """Take all pictures."""
    with ExitStack() as stack:
        folder = Path(
            sys.argv[1] if sys.argv[1:] else stack.enter_context(tempfile.TemporaryDirectory())
        )
        port = free_port()
        store = stack.enter_context(_store(folder / "store"))
        urls = [URL.format(JOBS[0].bucket, index) for index in range(HERE)]
        here = make_hollow_shards(folder / "cache", urls, SHARD_BYTES)
        # What holds nothing would not stand up to being read again.
        flags = ("--http", f"127.0.0.1:{port}", "--scrub-rate", "0", "--part-size", "1MiB")
        daemon = stack.enter_context(Daemon(folder, *flags, capacity=CAPACITY, env=store.env()))
        browser = stack.enter_context(chromium())
        with reading(daemon, here, *JOBS), opened(browser, f"http://127.0.0.1:{port}/") as page:
            time.sleep(WATCHED_S)  # until the chart has something to show
            _photograph(page, "dashboard")
            with reading(daemon, here, LATECOMER):
                page.until("document.querySelector('#verdict.stalled') && true")
                time.sleep(STALLED_S)
                _photograph(page, "dashboard-waiting")


@contextmanager
def _store(folder: Path) -> Iterator[ThrottledS3]:
    """Serve datasets all of whose shards are one file, most of it a hole."""
    folder.mkdir()
    info = tarfile.TarInfo("sample.jpg")
    info.size = SHARD_BYTES - 4 * tarfile.BLOCKSIZE
    one = folder / "one.tar"
    one.write_bytes(info.tobuf())
    with one.open("r+b") as file:
        file.truncate(SHARD_BYTES)
    for bucket in (JOBS[0].bucket, LATECOMER.bucket):
        (folder / bucket).mkdir()
        for index in range(SHARDS):
            (folder / bucket / Path(URL.format(bucket, index)).name).hardlink_to(one)
    with ThrottledS3(folder, total_bytes_per_s=STORE_BYTES_PER_S) as store:
        yield store


def _photograph(page: Tab, name: str) -> None:
    for suffix, dark in (("", False), ("-dark", True)):
        page.look(dark=dark)
        page.until(f"matchMedia('(prefers-color-scheme: dark)').matches === {str(dark).lower()}")
        time.sleep(2.0)  # it is drawn anew with what comes next
        page.picture(PICTURES / f"{name}{suffix}.png")


if __name__ == "__main__":
    main()
