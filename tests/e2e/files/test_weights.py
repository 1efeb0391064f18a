"""Recipes for weights and tables: fetched once per node, and mapped by every process."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from shardcache_client.files.paths import cached_paths, open_cached
from support.programs.daemon import Daemon

WEIGHTS = {
    f"layer.{number}": torch.arange(64 * number, 64 * (number + 1), dtype=torch.float32)
    for number in range(4)
}

LOAD = """
import os, sys, safetensors
from shardcache_client import cached_paths
with cached_paths(sys.argv[1], socket=sys.argv[2]) as (path,):
    with safetensors.safe_open(path, "pt") as weights:
        print(os.stat(path).st_ino, float(weights.get_tensor("layer.3").sum()), flush=True)
        sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A model's files."""
    with tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as name:
        model = Path(name) / "model"
        model.mkdir()
        safetensors.torch.save_file(WEIGHTS, model / "model.safetensors")
        torch.save(WEIGHTS, model / "model.pt")
        yield Path(name)


def check(weights: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == WEIGHTS.keys()
    assert all(torch.equal(weights[name], WEIGHTS[name]) for name in WEIGHTS)


def test_safetensors_are_loaded_from_the_cache(folder: Path, daemon: Daemon) -> None:
    """safetensors maps the file by its path."""
    with cached_paths(f"{folder}/model/*.safetensors", socket=daemon.socket) as (path,):
        check(safetensors.torch.load_file(path))


def test_torch_maps_a_checkpoint_from_the_cache(folder: Path, daemon: Daemon) -> None:
    """torch.load maps the file, and executes nothing of it."""
    with open_cached(f"{folder}/model/model.pt", socket=daemon.socket) as file:
        check(torch.load(file.name, mmap=True, weights_only=True))


@pytest.mark.slow
def test_two_processes_share_one_fetch_and_one_copy_in_memory(folder: Path, daemon: Daemon) -> None:
    """Both map the same file; the object crossed the network once."""
    before = daemon.status()["counters"]["origin_bytes"]
    url = folder / "model/second.safetensors"
    safetensors.torch.save_file(WEIGHTS, url)
    command = [sys.executable, "-c", LOAD, str(url), str(daemon.socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as two:
            assert one.stdout
            assert two.stdout
            assert (
                one.stdout.readline()
                == two.stdout.readline()
                == f"{inode(daemon, url)} {14304.0}\n"
            )
            two.communicate()
        one.communicate()
    assert daemon.status()["counters"]["origin_bytes"] - before == url.stat().st_size


def inode(daemon: Daemon, url: Path) -> int:
    with cached_paths(url, socket=daemon.socket) as (path,):
        return Path(path).stat().st_ino


def test_arrow_reads_tables_from_the_cache(folder: Path, daemon: Daemon) -> None:
    """Arrow takes the paths of cached files."""
    (folder / "tables").mkdir()
    for number in range(2):
        pyarrow.parquet.write_table(
            pyarrow.table({"n": [number, number + 10]}), folder / f"tables/{number}.parquet"
        )
    with cached_paths(f"{folder}/tables/", socket=daemon.socket) as paths:
        assert sorted(
            pyarrow.dataset.dataset(paths, format="parquet").to_table()["n"].to_pylist()
        ) == [0, 1, 10, 11]
