"""Attacks on the S3 endpoint: each request gets the right bytes, or the right error."""

import re
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from support.network.http_requests import Answer
from support.programs.daemon import Daemon
from support.programs.s3_door import (
    DOOR,
    address_of,
    ask,
    connect,
    connection,
    keys_of,
    refusal,
    request_of,
    signed,
)
from support.stores.buckets import Bucket, MotoS3, new_bucket

# Keys that end like urls with a version or a key split, of the object `a`.
LIKE_URLS = ("a?versionId=null", "a?versionId=1", "a#key_split=last-dot")


@pytest.fixture(scope="module")
def bucket(moto_server: MotoS3) -> Bucket:
    """A bucket with keys that are easily taken for others."""
    found = new_bucket(moto_server)
    for key in ("a", "/a", "\\a", "a/", "a//b", "a/b", "%61", "a\rb", "a?b", "a#b", *LIKE_URLS):
        found.put(key, f"body of {key}".encode())
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> Iterator[Daemon]:
    """A daemon with an endpoint, for the whole module."""
    with Daemon(tmp_path_factory.mktemp("d"), *DOOR, env=bucket.env()) as running:
        yield running


@pytest.fixture
def target(bucket: Bucket) -> str:
    """The path of an object that may be read."""
    return f"/{bucket.name}/a"


def read(daemon: Daemon, target: str, **headers: str) -> Answer:
    """Send a signed request."""
    return ask(daemon, *signed(daemon, target, keys_of(daemon), **headers))


def keys_in(answer: Answer) -> list[str]:
    """Return the keys in a listing whose keys are percent-encoded."""
    return [unquote(key) for key in re.findall("<Key>(.*?)</Key>", answer.body.decode())]


def status_of_raw(daemon: Daemon, request: bytes) -> tuple[int, bool]:
    """Send bytes; return the status of the first answer, and whether another answer follows."""
    with connection(daemon) as client:
        client.sendall(request)
        answer = HTTPResponse(client)
        answer.begin()
        answer.read()
        if answer.will_close:
            return answer.status, False
        client.sendall(b"\r\n")
        return answer.status, client.recv(1) != b""


@pytest.mark.parametrize("key", ["a", "/a", "\\a", "a/", "a//b", "a/b", "%61", "a?b", "a#b"])
def test_each_key_is_its_own_object(daemon: Daemon, bucket: Bucket, key: str) -> None:
    """However much it looks like a path, an encoded name, or a url."""
    answer = read(daemon, f"/{bucket.name}/{quote(key)}")
    assert answer.body == f"body of {key}".encode()


@pytest.mark.parametrize("key", LIKE_URLS)
def test_keys_like_versions_are_refused(daemon: Daemon, bucket: Bucket, key: str) -> None:
    """The object without this ending is another one, which must not be given in its place."""
    answer = read(daemon, f"/{bucket.name}/{quote(key)}")
    assert answer.status == 400
    assert answer.code == "InvalidRequest"


@pytest.mark.parametrize("prefix", ["a?", *LIKE_URLS])
def test_prefixes_like_versions_are_prefixes(daemon: Daemon, bucket: Bucket, prefix: str) -> None:
    """Its listing has the keys that begin so, and no others."""
    query = f"list-type=2&encoding-type=url&prefix={quote(prefix, safe='')}"
    listed = keys_in(read(daemon, f"/{bucket.name}?{query}"))
    stored = bucket.server.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix)
    assert listed == [entry["Key"] for entry in stored["Contents"]]


@pytest.mark.parametrize("query", ["versionId=null", "versionId=1", "versionId", "versionid=1"])
def test_no_version_is_given_in_place_of_another(daemon: Daemon, target: str, query: str) -> None:
    """The version `null` may be older than the present one."""
    answer = read(daemon, f"{target}?{query}")
    assert answer.status == 501
    assert answer.code == "NotImplemented"


def test_a_listing_of_no_keys_says_whether_there_is_a_bucket(daemon: Daemon) -> None:
    """As S3's does."""
    answer = read(daemon, "/nowhere-at-all?list-type=2&max-keys=0")
    assert answer.status == 404
    assert answer.code == "NoSuchBucket"


def test_a_listing_of_no_keys_is_judged_by_the_rules(tmp_path: Path, bucket: Bucket) -> None:
    """It is permitted where one of all keys would be."""
    rule = ("--allow", f"{bucket.url}/a/")
    with Daemon(tmp_path, *DOOR, *rule, env=bucket.env()) as daemon:
        client = connect(daemon)
        listing = {"Bucket": bucket.name, "MaxKeys": 0}
        assert client.list_objects_v2(**listing, Prefix="a/")["KeyCount"] == 0
        refused = refusal(client.list_objects_v2, **listing)
        assert refused == (403, "AccessDenied")
        client.close()


def test_a_carriage_return_in_a_key_is_kept(daemon: Daemon, bucket: Bucket) -> None:
    """Parsers of XML would take it for a line feed, which is in another key."""
    answer = read(daemon, f"/{bucket.name}?list-type=2")
    assert b"<Key>a&#13;b</Key>" in answer.body


@pytest.mark.parametrize(
    ("expires", "code"),
    [
        ("0", "SignatureDoesNotMatch"),
        ("-1", "AuthorizationQueryParametersError"),
        ("604801", "AuthorizationQueryParametersError"),
        ("9" * 400, "AuthorizationQueryParametersError"),
        ("1e3", "AuthorizationQueryParametersError"),
        ("+60", "AuthorizationQueryParametersError"),
        ("604800", "SignatureDoesNotMatch"),
    ],
)
def test_presigned_urls_end(daemon: Daemon, target: str, expires: str, code: str) -> None:
    """One that was signed for a minute ends then, whatever its query says."""
    presigned, headers = signed(daemon, target, keys_of(daemon), presigned_s=60)
    moved = presigned.replace("X-Amz-Expires=60", f"X-Amz-Expires={expires}")
    answer = ask(daemon, moved, headers)
    assert answer.code == code
    assert ask(daemon, presigned, headers).status == 200


SMUGGLED = [
    "Content-Length: 4\r\nTransfer-Encoding: chunked",
    "Content-Length: 0\r\nContent-Length: 4",
    "Content-Length: +4",
    "Content-Length: 4, 4",
    "Content-Length: 99999999999999999999999",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding: \x0bchunked",
    "Host: 127.0.0.1",
    "X-Folded: a\r\n b",
    "X-Bare: a\nX-Line: b",
    "X-Bare: a\rb",
    "X-Null: a\x00b",
    "X Space: a",
    "No colon",
    ": no name",
    f"X-Huge: {'a' * 10_000}",
    "\r\n".join(f"X-{number}: a" for number in range(1000)),
]


@pytest.mark.parametrize("lines", SMUGGLED)
def test_ambiguous_requests_end_their_connection(daemon: Daemon, target: str, lines: str) -> None:
    """Its end could be another one for a proxy, so nothing after it is read as a request."""
    request = request_of(*signed(daemon, target, keys_of(daemon)))
    head = request.removesuffix(b"\r\n") + lines.encode() + b"\r\n\r\n"
    assert status_of_raw(daemon, head + request) == (400, False)
    assert read(daemon, target).body == b"body of a"


def test_a_refused_upload_is_not_read_as_a_request(daemon: Daemon, target: str) -> None:
    """The body of a request that writes holds a signed request; its connection ends."""
    request = request_of(*signed(daemon, target, keys_of(daemon)))
    address = address_of(daemon)
    sizes = f"Host: {address}\r\nContent-Length: {len(request)}\r\n\r\n"
    put = f"PUT {target} HTTP/1.1\r\n{sizes}".encode()
    assert status_of_raw(daemon, put + request) == (403, False)
