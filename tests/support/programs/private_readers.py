"""Processes that read the same few shards through a private daemon."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from shardcache_client.reader import ShardReader
from support.programs.guard import GUARD_S

SHARDS = 4
SAMPLES = 5
KEYS = [f"{number:06d}" for number in range(SHARDS * SAMPLES)]

# Reads everything, and prints the keys; with an argument, stops for good after the first sample.
READ = """
import signal, sys
from shardcache_client import ShardReader
for sample in ShardReader(sys.argv[1], partial_reads=False):
    print(sample["__key__"], flush=True)
    if sys.argv[2:]:
        signal.pause()
"""


def read(root: Path) -> list[str]:
    """Read all samples in this process."""
    return [sample["__key__"] for sample in ShardReader(f"{root}/data/", timeout_s=GUARD_S)]


def start_reader(
    root: Path, *arguments: str, prefix: tuple[str, ...] = (), urls: str = "", **options: Any
) -> subprocess.Popen[str]:
    """Start a process that reads all samples, in a command that begins with `prefix`."""
    command = [*prefix, sys.executable, "-c", READ, urls or f"{root}/data/", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
