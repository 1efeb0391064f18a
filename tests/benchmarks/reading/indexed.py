"""Scattered samples by their numbers, from a distant store: cold, and again from local disk.

One sample in ten is read: of more, so many would be in the same parts that whole shards are fetched
in their place. The store answers after 30 ms and is as fast as a network of 8 Gbit/s, which these
samples do not fill. Next to them, what each costs without a table of samples: the fetching of its
whole shard.
"""

import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.data import LARGE, Dataset
from benchmarks.measure import Figure, Row, Target, call, interleaved, median_of
from benchmarks.workplace import Workplace
from support.programs.cli import shardcache
from support.stores.throttled_s3 import ThrottledS3

READ_SHARE = 0.1
NETWORK_BYTES_PER_S = 1e9
CONNECTIONS = 64
DEFAULT_CONNECTIONS = 16
BATCH_SAMPLES = 256
BY_SHARDS_SAMPLES = 20
OURS = "shardcache"
BY_DEFAULT = f"the default {DEFAULT_CONNECTIONS} connections"
BY_SHARDS = "whole shards"


@dataclass(frozen=True, slots=True)
class Scattered:
    """Outcome of reading samples at random numbers.

    Attributes:
        cold_per_s: samples per second of the first time.
        again_per_s: those of the second time.
        grown_mb: by how much the reader's memory grew.
        fetched: bytes from the store for each byte of the samples.
    """

    cold_per_s: float
    again_per_s: float
    grown_mb: float
    fetched: float = 0.0


def measure(place: Workplace) -> Iterator[Row]:
    """Yield samples per second, and bytes from the store for each byte that was read."""
    dataset = place.dataset(LARGE)
    with place.far_store(dataset, total_bytes_per_s=NETWORK_BYTES_PER_S) as store:
        index, bare = _index(place, dataset, store)
        samples = round(READ_SHARE * dataset.samples)
        contenders = {
            OURS: partial(_scattered, place, store, index, samples, CONNECTIONS),
            BY_DEFAULT: partial(_scattered, place, store, index, samples, DEFAULT_CONNECTIONS),
            BY_SHARDS: partial(_scattered, place, store, bare, BY_SHARDS_SAMPLES, CONNECTIONS),
        }
        tries = interleaved(contenders, place.say, place.rounds)
    cold = median_of(tries, "cold_per_s")
    again = median_of(tries, "again_per_s")
    fetched = median_of(tries, "fetched")
    what = f"scattered samples of {LARGE.label}, batches of {BATCH_SAMPLES}"
    cold_what = f"cold, {what}, {CONNECTIONS} connections"
    target = Target("≥", 1.0)
    yield Row("samples/s", cold_what, cold[OURS], BY_SHARDS, cold[BY_SHARDS], target)
    yield Row("samples/s", cold_what, cold[OURS], BY_DEFAULT, cold[BY_DEFAULT])
    yield Row("samples/s", f"again, {what}", again[OURS], BY_SHARDS, again[BY_SHARDS])
    yield Row(
        "bytes", "from the store for each byte read", fetched[OURS], BY_SHARDS, fetched[BY_SHARDS]
    )
    yield Row("MB", "more memory of the reader", Figure(one.grown_mb for one in tries[OURS]))


def _index(place: Workplace, dataset: Dataset, store: ThrottledS3) -> tuple[str, str]:
    """Return the paths of two indexes, of which only the first has a table of samples beside it."""
    index = place.root / "indexed" / "index.json"
    index.parent.mkdir(exist_ok=True)
    bare = index.with_name("bare.json")
    urls = f"s3://{dataset.folder.name}/{dataset.names}"
    with place.daemon(store=store) as daemon:
        ran = shardcache("index", urls, "-o", index, "--samples", socket=daemon.socket)
    if ran.code:
        raise RuntimeError(f"the shards cannot be indexed: {ran.err}")
    shutil.copy(index, bare)
    return str(index), str(bare)


def _scattered(
    place: Workplace, store: ThrottledS3, index: str, samples: int, connections: int
) -> Scattered:
    with place.daemon(store=store, max_connections=connections) as daemon:
        before_bytes = store.stats().sent_bytes
        found = Scattered(**call(read, socket=str(daemon.socket), index=index, count=samples))
        sent_bytes = store.stats().sent_bytes - before_bytes
    return Scattered(
        found.cold_per_s,
        found.again_per_s,
        found.grown_mb,
        sent_bytes / (samples * LARGE.sample_bytes),
    )


def read(socket: str, index: str, count: int) -> Scattered:
    """Read samples at random numbers, twice, in batches."""
    from shardcache_client.reader import ShardReader

    with ShardReader(
        index, socket=socket, decode=lambda sample: len(sample["jpg"])
    ).indexed() as samples:
        numbers = random.Random(7).sample(range(len(samples)), count)
        samples[numbers[:1]]
        before_mb = _memory_mb()
        rates = []
        for _ in range(2):
            begun_s = time.perf_counter()
            for first in range(0, count, BATCH_SAMPLES):
                samples[numbers[first : first + BATCH_SAMPLES]]
            rates.append(count / (time.perf_counter() - begun_s))
        return Scattered(*rates, _memory_mb() - before_mb)


def _memory_mb() -> float:
    """Return the memory of this process that no file holds."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1e3
