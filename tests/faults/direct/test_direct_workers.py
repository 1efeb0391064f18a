"""`fallback="direct"`: the transport worker that each reading process has, and shares with none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

pytestmark = pytest.mark.slow

SHARDS, SAMPLES = 4, 10

# Readers are forked by a process of their own: the threads of this one's servers take locks as they please.
_READERS = """
import json, os, select, signal, sys
from shardcache.direct.service import Direct
from shardcache.protocol import ShardRef
from support.programs.processes import transport_workers

urls = sys.argv[1:]

def fetch(direct, url):
    assert direct.fetch(ShardRef(url)).wait(60) is not None

def forked(job):  # returns its pid and what it says
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        job(lambda said: os.write(writes, json.dumps(said).encode()))
        sys.exit()  # as a script does: everything is collected
    os.close(writes)
    return pid, json.loads(os.read(reads, 65536))
"""

_ENDS = """
def reader_that(ends):
    def job(say):
        direct = Direct()
        fetch(direct, urls[0])
        survivor = 0
        if "child" in ends:  # it has inherited the pipes
            survivor = os.fork() or signal.pause()
        say([list(transport_workers(os.getpid())), survivor])
        signal.sigwait([signal.SIGUSR1])
        if ends == "raises":
            raise RuntimeError("on purpose")
        if "killed" in ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if ends == "os._exit":
            os._exit(0)
    return job

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
for ends in ("exits", "raises", "os._exit", "killed", "killed, and outlived by a child"):
    reader, (workers, survivor) = forked(reader_that(ends))
    fds = [os.pidfd_open(worker) for worker in workers]
    os.kill(reader, signal.SIGUSR1)
    os.waitpid(reader, 0)
    print(json.dumps([ends, *(bool(select.select([fd], [], [], 20)[0]) for fd in fds)]))
    if survivor:
        os.kill(survivor, signal.SIGKILL)
"""

_FORKS = """
def look_on(say):
    say([])

def read_too(say):
    own = Direct()
    fetch(own, urls[1])
    say(list(transport_workers(os.getpid())))

direct = Direct()
fetch(direct, urls[0])
mine = transport_workers(os.getpid())
for number, job in enumerate((look_on, read_too), 2):
    child, workers = forked(job)
    os.waitpid(child, 0)
    fetch(direct, urls[number])
    print(json.dumps([len(workers), len(mine & set(workers)), transport_workers(os.getpid()) == mine]))
"""

_LOADER = """
from torch.utils.data import DataLoader
from shardcache_client import ShardDataset
from support.programs.daemon import eventually

*urls, no_socket = urls

def dataset():
    return ShardDataset(urls, socket=no_socket, fallback="direct")

parent = iter(dataset())
next(parent)
mine = transport_workers(os.getpid())
loading = iter(DataLoader(dataset(), batch_size=None, num_workers=2))
readers = [worker.pid for worker in loading._workers]
eventually(lambda: all(map(transport_workers, readers)))
started = mine.union(*map(transport_workers, readers))
read = [sum(1 for _ in loading)]
eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started - mine))
read.append(sum(1 for _ in parent))
print(json.dumps([len(started), read, transport_workers(os.getpid()) == mine]))
"""


@pytest.fixture
def urls(moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The urls of some shards that this process and its children may fetch."""
    monkeypatch.setenv("SHARDCACHE_DIRECT_DIR", str(tmp_path))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    tars = [make_tar(random_samples(SAMPLES, {"jpg": 5000}, first=number * SAMPLES)) for number in range(SHARDS)]
    return [moto.put(f"{number}.tar", tar) for number, tar in enumerate(tars)]


def lines_of(script: str, urls: list[str]) -> list[list[object]]:
    """Run a script; return what it prints, which is a list of JSON a line."""
    command = [sys.executable, "-c", _READERS + script, *urls]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_worker_ends_with_its_reader(urls: list[str]) -> None:
    """However the reader ends; its children have the pipes to its worker as well, which keep it no longer alive."""
    ends = ("exits", "raises", "os._exit", "killed", "killed, and outlived by a child")
    assert lines_of(_ENDS, urls) == [[how, True] for how in ends]


def test_forked_children_leave_their_parents_worker_to_it(urls: list[str]) -> None:
    """One that reads starts its own; the parent's serves on when they have ended as scripts do."""
    looked_on, read_too = lines_of(_FORKS, urls)
    assert (looked_on, read_too) == ([0, 0, True], [1, 0, True])


def test_each_loader_worker_has_its_own(urls: list[str], tmp_path: Path) -> None:
    """DataLoader's workers fork while their parent reads; all read, and their transport workers end with them."""
    [[started, read, kept]] = lines_of(_LOADER, [*urls, str(tmp_path / "no.sock")])
    assert (started, read, kept) == (3, [SHARDS * SAMPLES, SHARDS * SAMPLES - 1], True)
