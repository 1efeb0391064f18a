"""Ten thousand ranges that are open at the same time: right bytes, in bounded memory."""

import os
import random
import resource
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from campaign.range_reads import Span, read_ranges
from support.programs.daemon import Daemon, eventually
from support.stores.canary import Canary

PART_BYTES = 64 * 1024
PARTS = 16
OBJECTS = 4
CLIENTS = 4
OPEN = 10_000
CONNECTIONS = 12_500  # an eighth of them is kept for commands
# Each is of a session of its own, as is a file that is open.
MOST_BYTES_PER_RANGE = 60_000
SLACK_BYTES = 48 * 1024 * 1024  # what the allocator keeps
MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
RANGE_BYTES = 5000
BODIES = [random.Random(seed).randbytes(PARTS * PART_BYTES) for seed in range(OBJECTS)]

_CLIENT = """
import os, random, sys, zlib
from contextlib import ExitStack
from pathlib import Path
from support.programs.raw_session import RawSession

socket, seed, count, size_bytes, range_bytes, *urls = sys.argv[1:]
rng = random.Random(int(seed))
held = []

def print_sums():
    for number, start, descriptor in held:
        print(number, start, zlib.crc32(os.pread(descriptor, int(range_bytes), start)))
    print("end", flush=True)

with ExitStack() as stack:
    for _ in range(int(count)):
        session = stack.enter_context(RawSession(Path(socket), job=f"client-{seed}"))
        number = rng.randrange(len(urls))
        start = rng.randrange(int(size_bytes) - int(range_bytes))
        session.plan([urls[number]], [0], wanted="ranges")
        last = start + int(range_bytes) - 1
        span = {"start": start, "beyond": last, "partial": True}
        grant = session.take(0, **span)
        assert grant["type"] == "arriving", grant
        descriptor = os.open(grant["path"], os.O_RDONLY)
        stack.callback(os.close, descriptor)
        assert os.fstat(descriptor).st_ino == grant["inode"]
        held.append((number, start, descriptor))
    print_sums()
    for line in sys.stdin:
        print_sums()
"""
"""Holds ranges, each of a session of its own, and prints their sums at first and for each line."""

Client = subprocess.Popen[str]


@contextmanager
def client(daemon: Daemon, seed: int, urls: list[str]) -> Iterator[Client]:
    """Run a client, which ends with its input."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    numbers = map(str, (seed, OPEN // CLIENTS, PARTS * PART_BYTES, RANGE_BYTES))
    command = [sys.executable, "-c", _CLIENT, str(daemon.socket), *numbers, *urls]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def sums(process: Client) -> list[tuple[int, int, int]]:
    """Return object, start and checksum of each range that a client holds."""
    assert process.stdout is not None
    found = []
    for line in iter(process.stdout.readline, "end\n"):
        assert line, "the client has failed"
        number, start, checksum = map(int, line.split())
        found.append((number, start, checksum))
    return found


def expected(start: int, number: int) -> int:
    """Return the checksum of a range."""
    return zlib.crc32(BODIES[number][start : start + RANGE_BYTES])


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose cache is smaller than what the ranges count for."""
    flags = ("--range-part-size", str(PART_BYTES), "--whole-from-percent", "100")
    flags += ("--socket-connections", str(CONNECTIONS))
    with Daemon(tmp_path, *flags, "--listing-ttl-s", "1000", capacity="64MB") as running:
        yield running


@pytest.mark.slow
@pytest.mark.skipif(
    MOST_FILES < CONNECTIONS + 500, reason=f"at most {MOST_FILES} files may be open"
)
def test_ten_thousand_open_ranges_take_little_memory(daemon: Daemon) -> None:
    """All of them are read again while all are open; others are served beside them, and after."""
    with Canary() as store, ExitStack() as stack:
        urls = [store.put(f"{number}.bin", body) for number, body in enumerate(BODIES)]
        before_bytes = daemon.status()["process"]["rss_bytes"]
        clients = [stack.enter_context(client(daemon, seed, urls)) for seed in range(CLIENTS)]
        for each in clients:
            check(each)

        assert daemon.sessions() == OPEN
        assert daemon.leases() >= OPEN
        taken_bytes = daemon.status()["process"]["rss_bytes"] - before_bytes
        print(f"{taken_bytes / OPEN / 1000:.1f} kB of the daemon's memory for each range")
        assert taken_bytes < OPEN * MOST_BYTES_PER_RANGE + SLACK_BYTES

        other = Span(store.put("other.bin", BODIES[0]), 100, 200)
        assert read_ranges(daemon, [other]) == [BODIES[0][100:200]]
        daemon.request("POST", "/v1/evict", {"urls": urls})
        for each in clients:
            assert each.stdin is not None
            each.stdin.write("again\n")
            each.stdin.flush()
            check(each)
    eventually(lambda: daemon.sessions() == 0)
    assert daemon.leases() == 0


def check(process: Client) -> None:
    """Compare all ranges that a client holds."""
    found = sums(process)
    assert len(found) == OPEN // CLIENTS
    wrong = [each for each in found if each[2] != expected(each[1], each[0])]
    assert wrong == []
