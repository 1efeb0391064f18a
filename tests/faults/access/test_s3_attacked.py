"""What attackers try at the S3 endpoint: each request has the right bytes, or the right error."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from support.network.http_requests import Answer
from support.programs.daemon import Daemon
from support.programs.s3_door import (
    DOOR,
    ask,
    connect,
    keys_of,
    refusal,
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


@pytest.mark.parametrize("key", ["a", "/a", "\\a", "a/", "a//b", "a/b", "%61", "a?b", "a#b"])
def test_each_key_is_its_own_object(daemon: Daemon, bucket: Bucket, key: str) -> None:
    """However much it looks like a path, an encoded name, or a url."""
    answer = read(daemon, f"/{bucket.name}/{quote(key)}")
    assert answer.body == f"body of {key}".encode()


@pytest.mark.parametrize("key", LIKE_URLS)
def test_keys_like_versions_are_refused(daemon: Daemon, bucket: Bucket, key: str) -> None:
    """The object without this ending is another one, which must not be given in its place."""
    answer = read(daemon, f"/{bucket.name}/{quote(key)}")
    assert (answer.status, answer.code) == (400, "InvalidRequest")


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
    assert (answer.status, answer.code) == (501, "NotImplemented")


def test_a_listing_of_no_keys_says_whether_there_is_a_bucket(daemon: Daemon) -> None:
    """As S3's does."""
    answer = read(daemon, "/nowhere-at-all?list-type=2&max-keys=0")
    assert (answer.status, answer.code) == (404, "NoSuchBucket")


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
