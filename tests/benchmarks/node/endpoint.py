"""The S3 endpoint: other loaders' jobs with it and without, and the cost of its answers.

The jobs download into folders of their own, as they do without the endpoint; the store is far away,
and counts what it sends. Answers are those of cached objects, of files that the kernel has in
memory: nginx sends the same files without asking who wants them, and checks no signature.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.data import LARGE
from benchmarks.downloads.download import MEMORY
from benchmarks.downloads.downloaders import Spent, download
from benchmarks.measure import (
    Row,
    Target,
    call,
    call_together,
    command,
    interleaved,
    median_of,
    medians,
    tree_cpu_s,
)
from benchmarks.node.small_ranges import RANGE_BYTES, answers_per_s
from benchmarks.servers import Endpoint, endpoints
from benchmarks.workplace import BUCKET, Daemon, Workplace
from support.programs.s3_door import address_of, keys_of, signed
from support.stores import aws_env
from support.stores.throttled_s3 import ThrottledS3

JOBS = 3
OURS = "shardcache"
NGINX = "nginx's static files"
ALONE = "without the endpoint"
_RANGES = 256  # that are asked for in turn
_TIMED_S = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A copy of all objects by s5cmd, and the processor time of the server, with its processes."""

    size_bytes: int
    wall_s: float
    server_cpu_s: float

    @property
    def mb_per_s(self) -> float:
        return self.size_bytes / 1e6 / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        return self.server_cpu_s / self.size_bytes * 1e9

    def __str__(self) -> str:
        return f"{self.mb_per_s:.0f} MB/s, {self.cpu_s_per_gb:.3f} CPU-s/GB of the server"


def measure(place: Workplace) -> Iterator[Row]:
    """Yield speed and cost of answers, as medians, and bytes from the store for each loader."""
    yield from _answers(place)
    yield from _jobs(place, "LitData", _read_litdata, place.litdata(LARGE))
    yield from _jobs(place, "MosaicML", _read_mosaicml, place.mosaicml(LARGE))


def _jobs(place: Workplace, loader: str, read: Callable[..., int], folder: Path) -> Iterator[Row]:
    """Yield the bytes that the store sends with the endpoint and without it, beside the data's."""
    for path in folder.iterdir():
        path.read_bytes()  # a far store has disks of its own
    with ThrottledS3(folder.parent.parent) as store, place.folder() as cache_dir:
        url = f"s3://{folder.parent.name}/{folder.name}"
        _run(place, read, url, store.env())
        alone_bytes = store.stats().sent_bytes
        place.say(f"{JOBS} {loader} jobs {ALONE}: {alone_bytes / 1e6:,.0f} MB from the store")
        with _door(cache_dir, store.env()) as daemon:
            _run(place, read, url, _env(daemon))
        bytes_ = store.stats().sent_bytes - alone_bytes
        place.say(f"{JOBS} {loader} jobs through it: {bytes_ / 1e6:,.0f} MB from the store")
    data_bytes = sum(path.stat().st_size for path in folder.iterdir())
    what = f"from the store, {JOBS} {loader} jobs"
    yield Row("MB", what, bytes_ / 1e6, "the dataset", data_bytes / 1e6, Target("=", 1.0))
    yield Row("MB", what, bytes_ / 1e6, ALONE, alone_bytes / 1e6)


def _run(place: Workplace, read: Callable[..., int], url: str, env: Mapping[str, str]) -> None:
    """Run the jobs at once, each in its own folder. Raises RuntimeError if one misses a sample."""
    with place.folder() as folder:
        jobs = [
            command(read, url=url, folder=str(folder / f"{number}"), seed=number)
            for number in range(JOBS)
        ]
        for seen in call_together(jobs, env):
            wanted = place.dataset(LARGE).samples
            if seen != wanted:
                raise RuntimeError(f"a job saw {seen} distinct samples instead of {wanted}")


def _read_litdata(url: str, folder: str, seed: int) -> int:
    """Read an epoch with litdata; return the number of distinct samples."""
    import os

    from litdata import StreamingDataset
    from litdata.streaming import downloader

    # It does not say to obstore that an endpoint may be plain HTTP, and has no option for that.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    place = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    dataset = StreamingDataset(
        url, cache_dir=folder, shuffle=True, seed=seed, storage_options=place
    )
    return len(
        {sample["__key__"] for sample in dataset if len(sample["jpg"]) == LARGE.sample_bytes}
    )


def _read_mosaicml(url: str, folder: str, seed: int) -> int:
    """Read an epoch with streaming; return the number of distinct samples."""
    from benchmarks.peers import mosaicml

    dataset = mosaicml().StreamingDataset(
        remote=url, local=folder, shuffle=True, shuffle_seed=seed, batch_size=8
    )
    return len({sample["key"] for sample in dataset if len(sample["jpg"]) == LARGE.sample_bytes})


@contextmanager
def _door(cache_dir: Path, env: Mapping[str, str]) -> Iterator[Daemon]:
    """A daemon with an endpoint, and an empty cache."""
    with Daemon(cache_dir, "100GB", {**env, "SHARDCACHE_S3": "127.0.0.1:0"}) as daemon:
        yield daemon


def _env(daemon: Daemon) -> dict[str, str]:
    """Return the variables by which S3 clients find a daemon's endpoint, and may use it."""
    keys = keys_of(daemon)
    return aws_env(f"http://{address_of(daemon)}", keys["AccessKeyId"], keys["SecretAccessKey"])


def _answers(place: Workplace) -> Iterator[Row]:
    """Yield what s5cmd and small ranges get of cached objects, from the endpoint and from nginx."""
    url = place.url(LARGE)
    # On the filesystem of nginx's files: the kernel sends those of tmpfs page by page, at up to
    # twice the cost.
    with endpoints(place, LARGE) as found, place.folder() as cache_dir:
        nginx = found[0]
        if nginx.pid == 0:
            return
        with _door(cache_dir, place.store.env()) as daemon:
            daemon.warm(url)
            ours = Endpoint(OURS, _env(daemon), daemon.pid)
            yield from _copies(place, ours, nginx)
            yield from _ranges(place, daemon, nginx)


def _copies(place: Workplace, ours: Endpoint, nginx: Endpoint) -> Iterator[Row]:
    contenders = {OURS: partial(_copy, place, ours), NGINX: partial(_copy, place, nginx)}
    tries = interleaved(contenders, place.say, place.rounds)
    for figure, unit, target in (
        ("mb_per_s", "MB/s", Target("≥", 0.8)),
        ("cpu_s_per_gb", "CPU-s/GB", Target("≤", 1.5)),
    ):
        found = median_of(tries, figure)
        what = (
            f"{'of the server, ' if unit == 'CPU-s/GB' else ''}s5cmd cp of cached objects of 64 MiB"
        )
        yield Row(unit, what, found[OURS], NGINX, found[NGINX], target)


def _copy(place: Workplace, endpoint: Endpoint) -> Served:
    objects = {
        f"{LARGE.name}/{path.name}": path.stat().st_size for path in place.dataset(LARGE).shards
    }
    with tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=MEMORY) as folder:
        before_s = tree_cpu_s(endpoint.pid)
        how: dict[str, Any] = {
            "tool": "s5cmd",
            "bucket": BUCKET,
            "objects": objects,
            "folder": folder,
        }
        spent = Spent(**call(download, endpoint.env, **how))
        cpu_s = tree_cpu_s(endpoint.pid) - before_s
    return Served(sum(objects.values()), spent.wall_s, cpu_s)


def _ranges(place: Workplace, daemon: Daemon, nginx: Endpoint) -> Iterator[Row]:
    path = f"/{BUCKET}/{LARGE.name}/{place.dataset(LARGE).shards[0].name}"
    size_bytes = place.dataset(LARGE).shards[0].stat().st_size
    numbers = random.Random(7)
    starts = [numbers.randrange(size_bytes - RANGE_BYTES) for _ in range(_RANGES)]
    texts = [f"bytes={start}-{start + RANGE_BYTES - 1}" for start in starts]
    keys = keys_of(daemon)
    web = urlsplit(nginx.env["AWS_ENDPOINT_URL"]).netloc
    ours = [_request(*signed(daemon, path, keys, range=text)) for text in texts]
    theirs = [_request(path, {"Host": web, "Range": text}) for text in texts]
    contenders = {
        OURS: partial(_rate, address_of(daemon), ours),
        NGINX: partial(_rate, web, theirs),
    }
    found = medians(contenders, place.say, place.rounds)
    what = "answered, ranges of 4 KiB of a cached object, 16 connections"
    yield Row("ranges/s", what, found[OURS], target=Target("≥", 5000))
    yield Row("ranges/s", what, found[OURS], NGINX, found[NGINX])


def _rate(address: str, requests: list[str]) -> float:
    host, _, port = address.rpartition(":")
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump(requests, file)
        file.flush()
        return float(
            call(answers_per_s, host=host, port=int(port), requests=file.name, timed_s=_TIMED_S)
        )


def _request(target: str, headers: Mapping[str, str]) -> str:
    """Return a request as it is sent."""
    lines = [
        f"GET {target} HTTP/1.1",
        *(f"{name}: {text}" for name, text in headers.items()),
        "",
        "",
    ]
    return "\r\n".join(lines)
