"""One tar as webdataset 1.0.2 reads it, as its index gives it, and as it is read while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from webdataset.handlers import reraise_exception
from webdataset.tariterators import group_by_keys, tar_file_expander

from shardcache.errors import ShardcacheError
from shardcache.protocol import Arriving
from shardcache.tarindex import index_tar, write
from shardcache_client.reading.shards import ArrivingShard, MappedShard

Items = list[tuple[str, Any]]


@dataclass(slots=True)
class Reading:
    """The samples that were given, as items, for their order counts; and the error that ended it, if one did."""

    samples: list[Items] = field(default_factory=list)
    error: Exception | None = None

    @property
    def keys(self) -> list[str]:
        """The samples' `__key__`s."""
        return [str(dict(items)["__key__"]) for items in self.samples]


def by_webdataset(path: Path, handler: Callable[[Exception], bool] = reraise_exception) -> Reading:
    """Read by webdataset's own stages: what its `tarfile_samples` does with an opened file."""
    with open(path, "rb") as stream:
        files = tar_file_expander([{"url": str(path), "stream": stream}], handler=handler)
        return _read(group_by_keys(files, handler=handler))


def by_index(path: Path, start: int = 0) -> Reading:
    """Index the tar, write and open its sidecar, and read from sample number `start` on."""
    try:
        reader = _publish(path)
    except ShardcacheError as exn:
        return Reading(error=exn)
    with closing(reader):
        return _read(reader.samples(start))


def by_number(path: Path) -> list[Items | None]:
    """Read each sample by its number, as a shuffled reader does, last first; None is in the place of a bad one."""
    with closing(_publish(path)) as reader:
        readings = [_read(map(reader.cutter(), [number])) for number in reversed(range(len(reader)))]
    return [None if reading.error else reading.samples[0] for reading in readings][::-1]


def by_arrival(path: Path, start: int = 0) -> Reading:
    """Read the tar while its bytes arrive, no more of them than are asked for; its last sample is left to the index."""
    stat = path.stat()

    def grant(ready_bytes: int) -> Arriving:
        return Arriving(
            type="arriving", id=0, lease=1, url=str(path), version="v1", path=str(path), inode=stat.st_ino,
            size_bytes=stat.st_size, ready_bytes=ready_bytes,
        )  # fmt: skip

    def more(beyond: int) -> Arriving | None:
        return grant(beyond + 1) if beyond < stat.st_size else None

    with closing(ArrivingShard(grant(0), more)) as shard:
        return _read(shard.samples(start))


def going_on(read: Callable[[Path, int], Reading], path: Path) -> list[Items | None]:
    """Read to the end, as with a handler that continues after each bad sample: None is in the place of one."""
    found: list[Items | None] = []
    while True:
        reading = read(path, len(found))
        found += reading.samples
        if reading.error is None:
            return found
        found.append(None)


def _publish(path: Path) -> MappedShard:
    sidecar = path.with_suffix(".idx")
    write(sidecar, {"size_bytes": path.stat().st_size}, index_tar(path, str(path)))
    return MappedShard(path, sidecar, str(path))


def _read(samples: Iterator[dict[str, Any]]) -> Reading:
    reading = Reading()
    try:
        for sample in samples:
            reading.samples.append(list(sample.items()))
    except Exception as exn:  # noqa: BLE001  webdataset raises what it likes; the tests say which they expect
        reading.error = exn
    return reading
