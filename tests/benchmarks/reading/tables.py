"""A `Table` of millions of rows beside shards: making it, looking up rows, and the memory of both.

Two processes make the dataset at the same time, as two ranks of a node do. One of them makes the
table, from one object of a store through a daemon; then both read samples, whose keys are those of
rows at random. `TABLE_ROWS=100000000` in the environment measures a table of 100 million rows,
which takes 10 GB of disk.
"""

import ctypes
import json
import logging
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, Target, call_together, command, peak_bytes
from benchmarks.workplace import BUCKET, PREPARED_S, Workplace, forget
from support.shards.tars import make_tar

ROWS = int(os.environ.get("TABLE_ROWS", 1_000_000))
_BATCH_ROWS = 1_000_000
_CLASSES = 21_841
_SHARDS = 8
_SHARD_SAMPLES = 25_000
_LOOKUPS = 1_000_000
_PROCESSES = 2
_SAMPLE_S = 0.05


def measure(place: Workplace) -> Iterator[Row]:
    """Yield the figures of two tables, parquet and JSON lines, of key, label and score."""
    rows = round(ROWS * place.scale)
    folder = place.root / "tables"
    folder.mkdir()
    shards = _shards(place, folder, rows)
    for suffix, write in (("parquet", _write_parquet), ("jsonl", _write_jsonl)):
        place.say(f"writing {rows:,} rows as {suffix}")
        path = folder / f"table.{suffix}"
        write(path, rows)
        place.store.put(BUCKET, f"tables/{path.name}", path)
        size_bytes = path.stat().st_size
        path.unlink()
        yield from _of_table(place, f"s3://{BUCKET}/tables/{path.name}", shards, rows, size_bytes)


def _of_table(
    place: Workplace, table: str, shards: str, rows: int, size_bytes: int
) -> Iterator[Row]:
    with place.daemon() as daemon, place.folder() as node:
        time.sleep(PREPARED_S)
        daemon.warm(shards)
        idle_bytes = peak_bytes(daemon.pid)
        idle_fetched = daemon.status()["counters"]["origin_bytes"]
        arguments = {"table": table, "shards": shards, "socket": str(daemon.socket), "rows": rows}
        tasks = [command(read, seed=seed, **arguments) for seed in range(_PROCESSES)]
        found = call_together(tasks, {"TMPDIR": str(node), **place.store.env()})
        fetched = daemon.status()["counters"]["origin_bytes"] - idle_fetched
        daemon_bytes = peak_bytes(daemon.pid) - idle_bytes
    place.say(json.dumps(found))
    yield from _rows(table, rows, found, fetched / size_bytes, daemon_bytes / 1e6)


def _rows(
    table: str,
    rows: int,
    found: list[dict[str, Any]],
    fetched_of_size: float,
    daemon_mb: float,
) -> Iterator[Row]:
    maker, other = sorted(found, key=lambda each: each["made"], reverse=True)
    if maker["made"] != 1 or other["made"] != 0:
        raise RuntimeError(f"{maker['made'] + other['made']} processes made the table")

    def row(unit: str, what: str, figure: float, target: Target | None = None) -> Row:
        return Row(
            unit, f"{what}, {rows:,} rows, {table.rpartition('.')[2]}", figure, target=target
        )

    yield row("times its bytes", "fetched from the store", fetched_of_size, Target("=", 1.0))
    yield row("s", "until the dataset is made by the process that makes the table", maker["open_s"])
    yield row("CPU-s", "of that process until then", maker["open_cpu_s"])
    yield row("s", "until it is made by another one, at the same time", other["open_s"])
    yield row(
        "MB",
        "more heap of the process that makes the table, at its peak",
        maker["made_heap"],
        Target("≤", 100),
    )
    yield row(
        "MB",
        "more heap of the other process, after all its reads",
        other["read_heap"],
        Target("≤", 100),
    )
    yield row("MB", "more memory of the daemon, at its peak", daemon_mb)
    yield row(
        "samples/s",
        "joined with rows at random, in each process",
        min(each["samples_s"] for each in found),
    )
    yield row(
        "/s",
        f"{_LOOKUPS:,} rows looked up at random, in each process",
        min(each["rows_s"] for each in found),
    )
    yield row("MB", "the table on the disk", max(each["file"] for each in found))
    yield from _page_cache_rows(found, row)


def _page_cache_rows(found: list[dict[str, Any]], row: Callable[..., Row]) -> Iterator[Row]:
    resident = max(found, key=lambda each: each["index_resident"] + each["rows_resident"])
    yield row(
        "MB",
        "of its index in the page cache after that",
        resident["index_resident"],
        Target("≤", 2_000),
    )
    yield row("MB", "of its rows in the page cache after that", resident["rows_resident"])


def _key(number: int) -> str:
    return f"{number:012d}"


def _shards(place: Workplace, folder: Path, rows: int) -> str:
    """Write shards whose samples have keys of the table, at random; return their url."""
    rng = random.Random(11)
    for number in range(_SHARDS):
        keys = sorted(rng.sample(range(rows), min(rows // _SHARDS, _SHARD_SAMPLES)))
        path = folder / f"{number}.tar"
        path.write_bytes(make_tar([{"__key__": _key(key), "jpg": b"x" * 400} for key in keys]))
        place.store.put(BUCKET, f"beside/{path.name}", path)
    return f"s3://{BUCKET}/beside/"


def _batches(rows: int) -> Iterator[Any]:
    """Yield the keys, labels and scores of the rows, in batches, as pyarrow's tables."""
    import numpy
    import pyarrow
    from pyarrow import compute

    rng = numpy.random.default_rng(7)
    for begin in range(0, rows, _BATCH_ROWS):
        numbers = numpy.arange(begin, min(rows, begin + _BATCH_ROWS))
        keys = compute.utf8_lpad(pyarrow.array(numbers).cast("string"), len(_key(0)), "0")
        labels = rng.integers(0, _CLASSES, len(numbers), numpy.int32)
        scores = rng.integers(0, 1_000, len(numbers)) / 1_000
        yield pyarrow.table({"key": keys, "label": labels, "score": scores})


def _write_parquet(path: Path, rows: int) -> None:
    from pyarrow import parquet

    first, *_ = _batches(1)
    with parquet.ParquetWriter(path, first.schema) as writer:
        for batch in _batches(rows):
            writer.write_table(batch)


def _write_jsonl(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for batch in _batches(rows):
            columns = (column.to_pylist() for column in batch.columns)
            lines = '{"key": "%s", "label": %d, "score": %s}\n'
            file.writelines(lines % row for row in zip(*columns, strict=True))


def read(table: str, shards: str, socket: str, rows: int, seed: int) -> dict[str, float]:
    """Make the dataset, read its samples, look up rows; return seconds, rates, and memory in MB."""
    import pyarrow.parquet  # noqa: F401  # in each process, whichever of them makes the table

    from shardcache_client.dataset import Joined, ShardDataset
    from shardcache_client.table import Table
    from shardcache_client.tables.row_index import RowIndex

    made = _Made()
    heap = _Heap()
    begun_s = time.perf_counter()
    begun_cpu_s = time.process_time()
    with heap.sampled():
        dataset = Joined({"": ShardDataset(shards, socket=socket), "row": Table(table, key="key")})
    found = {
        "open_s": time.perf_counter() - begun_s,
        "open_cpu_s": time.process_time() - begun_cpu_s,
        "made_heap": heap.peak_bytes / 1e6,
        "made": len(made.messages),
    }
    (path,) = Path(tempfile.gettempdir()).glob("shardcache-tables-*/*.rows")
    forget([path])  # pages of the process that wrote it

    with heap.sampled():
        begun_s = time.perf_counter()
        joined = sum(1 for sample in dataset if "row.label" in sample)
        found["samples_s"] = joined / (time.perf_counter() - begun_s)
        index = RowIndex(path)
        rng = random.Random(seed)
        keys = [_key(rng.randrange(rows)) for _ in range(_LOOKUPS)]
        begun_s = time.perf_counter()
        for key in keys:
            (row,) = index.rows(key)
            if row.keys() != {"label", "score"}:
                raise RuntimeError(f"{key} has another row: {row}")
        found["rows_s"] = len(keys) / (time.perf_counter() - begun_s)
        del keys
    index_bytes = index._entries.nbytes + index._starts.nbytes
    resident = _resident_pages(path)
    first_page = (path.stat().st_size - index_bytes) // mmap.PAGESIZE
    return found | {
        "read_heap": heap.now_bytes() / 1e6,
        "file": path.stat().st_size / 1e6,
        "index": index_bytes / 1e6,
        "rows_resident": int(resident[:first_page].sum()) * mmap.PAGESIZE / 1e6,
        "index_resident": int(resident[first_page:].sum()) * mmap.PAGESIZE / 1e6,
    }


class _Made(logging.Handler):
    """Takes the messages of this process that it reads a table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logging.getLogger("shardcache").addHandler(self)
        logging.getLogger("shardcache").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("reading the rows of"):
            self.messages.append(record.getMessage())


class _Heap:
    """The heap of this process: resident anonymous memory, less what it has at the start."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._before_bytes = 0
        self._before_bytes = self.now_bytes()

    def now_bytes(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
        return int(kilobytes) * 1024 - self._before_bytes

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Look at the heap all the time, in a thread, for its peak."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(_SAMPLE_S):
                self.peak_bytes = max(self.peak_bytes, self.now_bytes())

        thread = threading.Thread(target=sample)
        thread.start()
        yield
        ended.set()
        thread.join()


def _resident_pages(path: Path) -> Any:
    """Return for each page of a file whether it is in the page cache, as an array of 0 and 1."""
    import numpy

    mapped = numpy.memmap(path, mode="r")
    pages = numpy.zeros(-(-len(mapped) // mmap.PAGESIZE), numpy.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(mapped.ctypes.data)
    length = ctypes.c_size_t(len(mapped))
    if libc.mincore(address, length, ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(ctypes.get_errno(), "mincore")
    return pages & 1
