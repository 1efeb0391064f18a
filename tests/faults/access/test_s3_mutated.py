"""Signed requests to the S3 endpoint, changed at random: none of them reads anything else."""

import random
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from support.cases import first_quick
from support.programs.daemon import Daemon
from support.programs.s3_door import DOOR, connection, keys_of, request_of, signed
from support.stores.buckets import Bucket, MotoS3, new_bucket

REQUESTS = 150
TOKENS = (
    b"\r\n",
    b"\n",
    b"\x00",
    b"\xff",
    b" ",
    b"\t",
    b"%",
    b"%2e%2e/",
    b"%00",
    b"/",
    b"//",
    b"?",
    b"&",
    b"=",
    b";",
    b",",
    b"+",
    b"%2F",
    b"team/",
    b"?partNumber=1",
    b"&x-id=a",
    b"\r\nRange: bytes=1-2",
    b"\r\nX-Amz-Date: 20260101T000000Z",
    b"\r\nOrigin: http://a",
    b"\r\nHost: 127.0.0.1",
    b"\r\nAuthorization: AWS4-HMAC-SHA256",
    b"Signature=",
    b"9" * 5000,
)
"""Insertions into requests, besides single bytes."""

Mutation = Callable[[random.Random, bytes], bytes]


@pytest.fixture(scope="module")
def bucket(moto_server: MotoS3) -> Bucket:
    """A bucket with an object that is read, and others that must not be."""
    found = new_bucket(moto_server)
    found.put("open/a", b"open")
    for key in ("team/a", "open/b", "open/", "a", "open//a"):
        found.put(key, b"another")
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[Daemon]:
    """A daemon with an endpoint."""
    with Daemon(tmp_path_factory.mktemp("d"), *DOOR, env=bucket.env()) as running:
        yield running


def change_byte(rng: random.Random, request: bytes) -> bytes:
    """Change one byte."""
    place = rng.randrange(len(request))
    return request[:place] + bytes([rng.randrange(256)]) + request[place + 1 :]


def change_case(rng: random.Random, request: bytes) -> bytes:
    """Change one letter from upper to lower case, or back."""
    place = rng.randrange(len(request))
    return request[:place] + request[place : place + 1].swapcase() + request[place + 1 :]


def insert(rng: random.Random, request: bytes) -> bytes:
    """Insert a token."""
    place = rng.randrange(len(request))
    return request[:place] + rng.choice(TOKENS) + request[place:]


def remove(rng: random.Random, request: bytes) -> bytes:
    """Remove some bytes."""
    place = rng.randrange(len(request))
    return request[:place] + request[place + rng.randint(1, 20) :]


def repeat(rng: random.Random, request: bytes) -> bytes:
    """Repeat some bytes."""
    place = rng.randrange(len(request))
    end = place + rng.randint(1, 20)
    return request[:end] + request[place:]


def move_line(rng: random.Random, request: bytes) -> bytes:
    """Move, remove or repeat one of the headers."""
    first, *lines = request.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if not lines:
        return request  # an earlier change has left none
    line = rng.choice(lines)
    if rng.random() < 0.7:
        lines.remove(line)
    if rng.random() < 0.7:
        lines.insert(rng.randint(0, len(lines)), line)
    return b"\r\n".join([first, *lines, b"", b""])


MUTATIONS: tuple[Mutation, ...] = (change_byte, change_case, insert, remove, repeat, move_line)


def answer_to(daemon: Daemon, request: bytes) -> tuple[int, bytes]:
    """Send a request, and what ends the head of any; return status and body of the answer."""
    with connection(daemon) as client:
        client.sendall(request + b"\r\n\r\n")
        answer = HTTPResponse(client)
        answer.begin()
        return answer.status, answer.read()


def requests_of(daemon: Daemon, path: str, keys: dict[str, Any]) -> list[tuple[bytes, int, bytes]]:
    """Return requests of three kinds, with status and body of their answers."""
    whole = request_of(*signed(daemon, path, keys))
    ranged = request_of(*signed(daemon, path, keys, Range="bytes=1-2"))
    presigned = request_of(*signed(daemon, path, keys, presigned_s=60))
    return [(whole, 200, b"open"), (ranged, 206, b"pe"), (presigned, 200, b"open")]


@pytest.mark.parametrize("seed", first_quick(list(range(6))))
def test_a_changed_request_reads_nothing_else(daemon: Daemon, bucket: Bucket, seed: int) -> None:
    """It has the answer of the unchanged one, or is refused: never a fault, nor a hang."""
    rng = random.Random(seed)
    unchanged = requests_of(daemon, f"/{bucket.name}/open/a", keys_of(daemon))
    for request, status, body in unchanged:
        assert answer_to(daemon, request) == (status, body)
    for _ in range(REQUESTS):
        request, status, body = rng.choice(unchanged)
        changed = request
        for _ in range(rng.randint(1, 3)):
            changed = rng.choice(MUTATIONS)(rng, changed)
        found_status, found_body = answer_to(daemon, changed)
        if found_status < 300:
            # A Range need not be signed: any client may send one.
            is_ranged = found_status == 206 and b"\r\nrange: bytes=1-2" in changed.lower()
            assert found_body == (b"pe" if is_ranged else body), changed
        else:
            assert 400 <= found_status < 500 or found_status == 501, changed
    assert "Traceback" not in daemon.log.read_text()
