"""The throttled store of the benchmarks keeps its rates, and ends with its owner."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.programs.daemon import eventually
from support.stores.throttled_s3 import CREDIT_S, Pacer, ThrottledS3

MB = 1_000_000

CHILD = """
import signal, sys
from pathlib import Path
from support.stores.throttled_s3 import ThrottledS3
with ThrottledS3(Path(sys.argv[1])) as store:
    print(store.endpoint_url, flush=True)
    signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the bucket `data`: 4 MB of anything."""
    bucket = tmp_path / "store" / "data"
    bucket.mkdir(parents=True)
    (bucket / "blob").write_bytes(bytes(range(250)) * (4 * MB // 250))
    return bucket.parent


def size_of_blob(store: ThrottledS3) -> int:
    """Read the blob over a connection of its own; return how many bytes came."""
    with closing(http.client.HTTPConnection(store.endpoint_url.removeprefix("http://"))) as connection:
        connection.request("GET", "/data/blob")
        return len(connection.getresponse().read())


@given(st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 300_000)), min_size=1, max_size=50))
def test_a_pacer_never_lets_more_than_its_rate_pass(asked: list[tuple[float, int]]) -> None:
    """Between any two releases pass the rate times the time between them, and the credit, at most."""
    pacer, now_s, released = Pacer(MB, CREDIT_S, 0.0), 0.0, []
    for idle_s, size_bytes in asked:
        now_s += idle_s
        now_s = max(now_s, pacer.due_s(size_bytes, now_s))
        released.append((now_s, size_bytes))
    for i, (start_s, _) in enumerate(released):
        for j in range(i + 1, len(released)):
            passed_bytes = sum(size_bytes for _, size_bytes in released[i + 1 : j + 1])
            assert passed_bytes <= MB * (released[j][0] - start_s + CREDIT_S) + 1e-3


@pytest.mark.parametrize(("connections", "rate"), [(1, 20 * MB), (4, 30 * MB)])
def test_rates_are_kept(folder: Path, connections: int, rate: int) -> None:
    """One connection gets no more than a connection's rate, several together no more than the line's."""
    far = ThrottledS3(folder, first_byte_s=0.05, connection_bytes_per_s=20 * MB, total_bytes_per_s=30 * MB)
    with far as store, ThreadPoolExecutor(connections) as pool:
        started_s = time.monotonic()
        came = sum(pool.map(lambda _: size_of_blob(store), range(connections)))
        elapsed_s = time.monotonic() - started_s
        stats = store.stats()
    assert stats.sent_bytes == came == connections * 4 * MB
    assert stats.requests == connections
    assert stats.sent_bytes <= rate * (elapsed_s - 0.05 + CREDIT_S)


def test_the_store_ends_with_the_process_that_started_it(folder: Path) -> None:
    """A store whose owner is killed goes, too."""
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", CHILD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tests) as owner:
        assert owner.stdout is not None
        host, _, port = owner.stdout.readline().strip().rpartition("/")[2].partition(":")
        os.kill(owner.pid, signal.SIGKILL)
    eventually(lambda: not _listens(host, int(port)))


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
