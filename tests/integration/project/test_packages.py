"""The sdist and the wheel: complete, in order for PyPI, and enough on their own."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import pytest

from shardcache import __version__
from support import ROOT
from support.programs.daemon import Daemon, spawn
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

pytestmark = pytest.mark.slow


PYTHONS = os.environ.get("PYTHONS", sys.executable).split()
EXTRAS = {
    "daemon": "fsspec, s3fs, awscrt",
    "parquet": "pyarrow.parquet, shardcache.writing",
    "datasets": "datasets, shardcache.writing",
    "azure": "adlfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "images": "numpy, PIL.Image, simplejpeg",
    "cluster": "cryptography.x509",
    "ray": "ray.data, shardcache_client.ray",
}
"""Modules that an extra is for."""


class Environment:
    """An empty virtual environment, into which `install` puts packages from the index."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        run("uv", "venv", "--quiet", "--python", python, folder)
        self.bin = folder / "bin"
        self.python = self.bin / "python"

    def install(self, *args: str | Path) -> None:
        """Install packages that are built already, as most users can build none."""
        run("uv", "pip", "install", "--quiet", "--no-build", "--python", self.python, *args)

    def run(self, *command: str | Path) -> str:
        """Run a program of this environment; return what it printed. It must succeed."""
        program, *args = command
        done = subprocess.run(
            [self.bin / program, *args],
            cwd=self.bin,
            capture_output=True,
            text=True,
            timeout=GUARD_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


READ = """
import sys
from shardcache_client import ShardReader
print(sum(1 for sample in ShardReader(sys.argv[1], socket=sys.argv[2])))
"""
OPEN = """
import sys, fsspec
with fsspec.open(f"shardcache::{sys.argv[1]}", shardcache={"socket": sys.argv[2]}) as file:
    print(len(file.read()))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both packages: the sdist from the checkout, the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run("build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def run(module: str, *args: str | Path) -> None:
    """Run one of Python's packaging tools. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stdout


def test_pypi_would_accept_and_show_them(dist: Path) -> None:
    """Twine finds no fault with the metadata and the README of either."""
    packages = sorted(path.name for path in dist.iterdir())
    assert packages == [
        f"shardcache-{__version__}-py3-none-any.whl",
        f"shardcache-{__version__}.tar.gz",
    ]
    run("twine", "check", "--strict", *dist.iterdir())


def test_the_sdist_is_the_checkout(dist: Path) -> None:
    """The sdist suffices to make tests, documentation and image."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("the checkout has no git: nothing says which files belong to it")
    assert {
        name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()
    } - packed == set()


def test_the_wheel_has_both_packages_and_nothing_else(wheel: Path) -> None:
    """The wheel has every module, page and type marker, but no test or third package."""
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "shardcache").rglob("*")
        if path.is_file()
    }
    client = ROOT / "client"
    sources |= {path.relative_to(client).as_posix() for path in client.rglob("*") if path.is_file()}
    left_out = ("__pycache__", ".ruff_cache")  # made by Python and the linter
    assert names == {name for name in sources if not any(part in name for part in left_out)}
    assert {"shardcache/py.typed", "shardcache_client/py.typed"} <= names


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("age", ["oldest", "newest"])
@pytest.mark.parametrize("extra", EXTRAS if "PYTHONS" in os.environ else ["daemon"])
def test_the_wheel_works_with_the_oldest_and_newest_packages_that_it_admits(
    python: str, age: str, extra: str, wheel: Path, tmp_path: Path, moto: Bucket
) -> None:
    """A node serves with `shardcache[daemon]` alone, and a job reads with `shardcache`."""
    node = Environment(tmp_path / "node", python)
    job = Environment(tmp_path / "job", python)
    oldest = ["--resolution", "lowest-direct", "-r", ROOT / "pyproject.toml"]
    node.install(
        *([*oldest, "--extra", extra, wheel] if age == "oldest" else [f"{wheel}[{extra}]"])
    )
    node.run("python", "-c", f"import {EXTRAS[extra]}")
    if extra != "daemon":
        return
    job.install(wheel, *(oldest if age == "oldest" else []))
    tar = make_tar(random_samples(10))
    url = moto.put("a.tar", tar)
    start = partial(spawn, python=str(node.python))
    with tempfile.TemporaryDirectory() as folder, Daemon(Path(folder), spawn=start) as daemon:
        socket = str(daemon.socket)
        node.run("shardcache", "warm", url, "--socket", socket)
        status = json.loads(node.run("shardcache", "status", "--json", "--socket", socket))
        assert status["version"] == __version__
        assert job.run("python", "-c", READ, url, socket) == "10\n"
        assert node.run("python", "-c", OPEN, url, socket) == f"{len(tar)}\n"
