"""Loaders of other projects read an epoch of their own formats through an endpoint."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ecosystem.endpoint.conftest import Endpoint
from support.programs.guard import GUARD_S

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

# By the name of the module that each is.
PACKAGES = {"mosaicml": "streaming", "litdata": "litdata", "s3torchconnector": "s3torchconnector"}
SAMPLES = 600


def run(*arguments: str, env: dict[str, str]) -> str:
    """Run the loaders' program, in a process of its own; return what it prints last."""
    done = subprocess.run(
        [sys.executable, "-m", "ecosystem.endpoint.s3_loaders", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=10 * GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return (done.stdout.splitlines() or [""])[-1]


@pytest.mark.parametrize("loader", PACKAGES)
def test_loader_reads_an_epoch(endpoint: Endpoint, tmp_path: Path, loader: str) -> None:
    """Each sample comes once, byte for byte, and the second job has nothing of the first's."""
    if not find_spec(PACKAGES[loader]):
        pytest.skip(f"{PACKAGES[loader]} is not installed")
    written = tmp_path / "written"
    written.mkdir()
    run(loader, "write", str(written), env={})
    bucket = f"{loader}-{random.randrange(10**9)}"
    endpoint.store.make_bucket(bucket)
    for path in written.iterdir():
        endpoint.store.put(bucket, f"data/{path.name}", path)

    before = endpoint.origin_bytes()

    for job in ("first", "second"):
        found = json.loads(
            run(loader, f"s3://{bucket}/data/", str(tmp_path / job), env=endpoint.env)
        )
        assert sorted(found) == list(range(SAMPLES))

    crossed = endpoint.origin_bytes() - before
    assert crossed <= sum(path.stat().st_size for path in written.iterdir()), "once for both jobs"
