"""The throttled store keeps its rates, and what reads from it reads what is in the folder."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.programs.daemon import eventually
from support.shards.tars import write_shards
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
    """A folder with the bucket `data`: two shards and 4 MB of anything."""
    bucket = tmp_path / "store" / "data"
    bucket.mkdir(parents=True)
    write_shards(bucket, 2, 50)
    (bucket / "blob").write_bytes(bytes(range(250)) * (4 * MB // 250))
    return bucket.parent


@pytest.fixture
def store(folder: Path) -> Iterator[ThrottledS3]:
    """A store that is near, for what has nothing to do with time."""
    with ThrottledS3(folder, first_byte_s=0) as server:
        yield server


@dataclass(frozen=True, slots=True)
class Answer:
    """Response to a plain HTTP client."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def ask(store: ThrottledS3, method: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Send one request over a connection of its own."""
    connection = http.client.HTTPConnection(store.endpoint_url.removeprefix("http://"))
    try:
        connection.request(method, path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


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
        answers = list(pool.map(lambda _: ask(store, "GET", "/data/blob"), range(connections)))
        elapsed_s = time.monotonic() - started_s
        stats = store.stats()
    assert stats.sent_bytes == sum(len(answer.body) for answer in answers) == connections * 4 * MB
    assert stats.requests == connections
    assert stats.sent_bytes <= rate * (elapsed_s - 0.05 + CREDIT_S)


def test_an_object_whole_and_in_ranges(store: ThrottledS3, folder: Path) -> None:
    """HEAD, GET and each form of Range give what HTTP says."""
    data = (folder / "data" / "blob").read_bytes()
    head, whole = ask(store, "HEAD", "/data/blob"), ask(store, "GET", "/data/blob")
    assert (head.status, head.headers["Content-Length"], head.body) == (200, str(len(data)), b"")
    assert (whole.status, whole.body, whole.headers["ETag"]) == (200, data, head.headers["ETag"])
    parts = {"10-19": data[10:20], "3999990-": data[-10:], "-7": data[-7:], "3999999-9999999": data[-1:]}
    for asked, part in parts.items():
        answer = ask(store, "GET", "/data/blob", {"Range": f"bytes={asked}"})
        assert (answer.status, answer.body) == (206, part)
    start = ask(store, "GET", "/data/blob", {"Range": "bytes=10-19"}).headers["Content-Range"]
    assert start == f"bytes 10-19/{len(data)}"


def test_refusals(store: ThrottledS3) -> None:
    """A missing object, a range beyond the end and a replaced version are refused, with the code of S3."""
    etag = ask(store, "HEAD", "/data/blob").headers["ETag"]
    assert ask(store, "GET", "/data/blob", {"If-Match": etag, "Range": "bytes=0-0"}).status == 206
    for path, headers, status, code in (
        ("/data/blob", {"If-Match": '"another"'}, 412, b"PreconditionFailed"),
        ("/data/blob", {"Range": "bytes=4000000-"}, 416, b"InvalidRange"),
        ("/data/nothing", {}, 404, b"NoSuchKey"),
        ("/nowhere/?list-type=2", {}, 404, b"NoSuchBucket"),
    ):
        answer = ask(store, "GET", path, headers)
        assert answer.status == status
        assert code in answer.body


def test_a_store_of_one_request_at_a_time_refuses_the_second(folder: Path) -> None:
    """As a bucket that throttles does."""
    with ThrottledS3(folder, first_byte_s=0.05, max_requests=1) as store, ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(store, "HEAD", "/data/blob"), range(2)))
        assert sorted(answer.status for answer in answers) == [200, 503]
        assert store.stats().refused == 1


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
