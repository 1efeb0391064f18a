"""Formats that are read by ranges: only the parts of what a library reads are fetched."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.programs.daemon import Daemon
from support.stores.canary import Canary

KIB = 1024
PART_BYTES = 64 * KIB


@pytest.fixture
def store() -> Iterator[Canary]:
    with Canary() as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ShardcacheFileSystem]:
    """The filesystem of a cache; what a file reads ahead is less than a part."""
    with Daemon(tmp_path, "--range-part-size", str(PART_BYTES)) as node:
        yield ShardcacheFileSystem(
            "http", socket=str(node.socket), skip_instance_cache=True, block_size=KIB
        )


def test_table_is_read_by_columns(store: Canary, files: ShardcacheFileSystem) -> None:
    """Only the footer of a parquet file and the pages of the chosen columns are fetched."""
    numbers = random.Random(7)
    columns = {
        name: [numbers.random() for _ in range(40_000)] for name in ("a", "b", "c", "d", "e", "f")
    }
    table = pyarrow.table(columns)
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="none", use_dictionary=False)
    body = sink.getvalue().to_pybytes()
    url = store.put("table.parquet", body)

    with files.open(url) as file:
        found = pyarrow.parquet.ParquetFile(file).read(columns=["c"])

    assert found.column("c").to_pylist() == columns["c"]
    assert store.asked_bytes() < len(body) / 3


def test_tensor_is_read_without_the_others(store: Canary, files: ShardcacheFileSystem) -> None:
    """Only the header of a file of safetensors and the chosen tensor are fetched."""
    tensors = {f"layer.{number}": torch.full((128, 512), float(number)) for number in range(12)}
    body = safetensors.torch.save(tensors)
    url = store.put("model.safetensors", body)

    with files.open(url) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        facts = json.loads(file.read(header_bytes))["layer.7"]
        start, end = (8 + header_bytes + offset for offset in facts["data_offsets"])
        file.seek(start)
        values = torch.frombuffer(bytearray(file.read(end - start)), dtype=torch.float32)

    assert torch.equal(values.reshape(facts["shape"]), tensors["layer.7"])
    assert store.asked_bytes() <= end - start + 3 * PART_BYTES
