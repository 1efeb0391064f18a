"""The number of files that one cold shard passes, from the plan to the first sample."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.daemon import Daemon, eventually, spawn
from support.programs.guard import GUARD_S
from support.programs.processes import children
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

# Of one idea each: 55 are the client's, 65 keep, plan and index it, and 56 carry it. The number is
# 196 where nothing else happens, and up to 202 where a part is late or a background task runs.
MAX_FILES = 210
TRACED = Path(__file__).with_name("traced")
FIRST_SAMPLE = """
import os, sys, pathlib
from shardcache_client import ShardDataset
dataset = ShardDataset(sys.argv[1], socket=sys.argv[2])
folder = pathlib.Path(os.environ["TRACED"])
(folder / "on").touch()
while len(list(folder.glob("*.on"))) < int(sys.argv[3]): pass
next(iter(dataset))
(folder / "off").touch()
while len(list(folder.glob("*.files"))) < int(sys.argv[3]): pass
"""


@pytest.mark.slow
def test_a_cold_shard_passes_few_files(moto: Bucket, tmp_path: Path) -> None:
    """Daemon, transport worker, indexer and client together stay below the limit."""
    url = moto.put("shard.tar", make_tar(random_samples(8)))
    traced = {
        "TRACED": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(TRACED), os.environ.get("PYTHONPATH", "")]),
    }
    with Daemon(tmp_path, env=traced, spawn=spawn) as daemon:
        eventually(lambda: len(children(daemon.pid)) >= 2)
        processes = 2 + len(children(daemon.pid))
        program = (sys.executable, "-c", FIRST_SAMPLE, url, str(daemon.socket), str(processes))
        subprocess.run(program, env=os.environ | traced, check=True, timeout=GUARD_S)
    ran = {line for path in tmp_path.glob("*.files") for line in path.read_text().splitlines()}
    print(f"{len(ran)} files", *sorted(ran), sep="\n")
    assert len(ran) <= MAX_FILES
