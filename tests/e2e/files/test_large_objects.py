"""Objects of a gigabyte of which readers want little: no more than that crosses the network.

The objects are sparse files: they have all of their size, and no bytes on the disk but those that
are looked for.
"""

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import safetensors

from shardcache.config.settings import Settings
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.daemon import Daemon, eventually
from support.stores.throttled_s3 import ThrottledS3

GIB = 1024**3
PART_BYTES = int(Settings.model_fields["range_part_size"].default)
# Of a table, four columns in each row group, and a hole after each group.
COLUMNS = ("a", "b", "c", "number")
GROUPS = 16
GROUP_ROWS = 20_000
COLUMN_BYTES = 8 * GROUP_ROWS
HOLE = bytes(GIB // GROUPS)
# Of a model.
LAYERS = 8
LAYER_BYTES = GIB // 8

# As the entry point of a wheel does.
fsspec.register_implementation("shardcache", ShardcacheFileSystem, clobber=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThrottledS3]:
    """A bucket `data` with a table and a model's weights, sent at full speed and counted."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "data").mkdir()
    write_table(folder / "data/table.parquet")
    write_weights(folder / "data/model.safetensors")
    with ThrottledS3(
        folder, first_byte_s=0, connection_bytes_per_s=1e12, total_bytes_per_s=1e12
    ) as running:
        yield running


class SparseFile(io.FileIO):
    """A new file that keeps no bytes of a hole."""

    def write(self, data: Any) -> int:
        if len(data) < len(HOLE):
            return super().write(data)
        self.seek(len(data), os.SEEK_CUR)
        return len(data)


def write_table(path: Path) -> None:
    """Write a parquet file of a gigabyte; each row's `number` is that of its row group."""
    schema = pyarrow.schema([(name, pyarrow.int64()) for name in COLUMNS])
    with SparseFile(path, "w") as file, pyarrow.PythonFile(file) as sink:
        table = pyarrow.parquet.ParquetWriter(
            sink, schema, compression="none", use_dictionary=False
        )
        for group in range(GROUPS):
            columns = {name: [group] * GROUP_ROWS for name in COLUMNS}
            table.write_table(pyarrow.table(columns, schema=schema))
            sink.write(HOLE)
        table.close()


def write_weights(path: Path) -> None:
    """Write a safetensors file of a gigabyte, of zeros with numbers at each layer's ends."""
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        place = [layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES]
        tensors[f"layer.{layer}"] = {
            "dtype": "F32",
            "shape": [LAYER_BYTES // 4],
            "data_offsets": place,
        }
    tensors["bias"] = {"dtype": "F32", "shape": [3], "data_offsets": [GIB, GIB + 12]}
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(GIB, os.SEEK_CUR)
        file.write(numpy.arange(3, dtype="<f4").tobytes())


@contextmanager
def counted(store: ThrottledS3, folder: Path) -> Iterator[tuple[ShardcacheFileSystem, list[float]]]:
    """Give a new cache's filesystem, and a list that gets the number of parts sent."""
    parts: list[float] = []
    before = store.stats().sent_bytes
    with Daemon(folder, env=store.env()) as node:
        yield ShardcacheFileSystem("s3", socket=str(node.socket), skip_instance_cache=True), parts
        # The daemon counts what the store sends; each counts a little after it.
        eventually(
            lambda: node.status()["counters"]["origin_bytes"] == store.stats().sent_bytes - before
        )
        parts.append(node.status()["counters"]["origin_bytes"] / PART_BYTES)


@pytest.mark.slow
def test_footer_of_a_large_table_costs_two_parts_at_most(
    store: ThrottledS3, tmp_path: Path
) -> None:
    """Its schema and the places of its row groups are known then."""
    with counted(store, tmp_path) as (files, parts), files.open("data/table.parquet") as file:
        table = pyarrow.parquet.ParquetFile(file)
        assert table.metadata.num_rows == GROUPS * GROUP_ROWS
        assert file.size > 0.9 * GIB
    assert parts[0] <= 2


@pytest.mark.slow
def test_dataset_reads_the_row_group_that_its_filter_wants(
    store: ThrottledS3, tmp_path: Path
) -> None:
    """pyarrow.dataset knows by the footer that no other group can have the number."""
    with counted(store, tmp_path) as (files, parts):
        table = pyarrow.dataset.dataset("data/table.parquet", filesystem=files, format="parquet")
        found = table.to_table(columns=["number"], filter=pyarrow.dataset.field("number") == 5)
    assert found["number"].to_pylist() == [5] * GROUP_ROWS
    # As many as a row group has, of which the column is one of four, or its ends lie in; and the
    # footer's.
    assert parts[0] <= 4 * COLUMN_BYTES / PART_BYTES + 2 + 2


@pytest.mark.slow
def test_scattered_reads_cost_their_own_parts(store: ThrottledS3, tmp_path: Path) -> None:
    """Two parts for each that may span two; nothing is read ahead of who jumps."""
    starts = [number * (GIB // 20) + 1234 for number in range(19)]
    with counted(store, tmp_path) as (files, parts), files.open("data/model.safetensors") as file:
        for start in starts:
            file.seek(start)
            assert len(file.read(1000)) == 1000
    assert parts[0] <= 2 * len(starts)


def test_single_range_costs_its_own_parts(store: ThrottledS3, tmp_path: Path) -> None:
    """Whoever asks for a range, and opens nothing, reads on nowhere."""
    with counted(store, tmp_path) as (files, parts):
        assert files.cat_file("data/model.safetensors", 0, 1)
    assert parts[0] <= 1


@pytest.mark.slow
def test_weights_are_read_by_tensor(store: ThrottledS3, tmp_path: Path) -> None:
    """The header and one tensor's bytes are found as by the safetensors library."""
    with counted(store, tmp_path) as (files, parts), files.open("data/model.safetensors") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(header_bytes))
        start, stop = tensors["bias"].pop("data_offsets")
        file.seek(8 + header_bytes + start)
        bias = file.read(stop - start)
    assert list(tensors) == [*(f"layer.{layer}" for layer in range(LAYERS)), "bias"]
    alone = json.dumps({"bias": {**tensors["bias"], "data_offsets": [0, stop - start]}}).encode()
    ((name, found),) = safetensors.deserialize(len(alone).to_bytes(8, "little") + alone + bias)
    assert name == "bias"
    assert numpy.frombuffer(found["data"], "<f4").tolist() == [0, 1, 2]
    assert parts[0] <= 4
