"""Versions of objects in S3, as `?versionId=` names them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest

from shardcache.errors import NotFoundError
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import open_cached
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import make_tar
from support.stores.buckets import Bucket


def tar_of(key: str) -> bytes:
    """Return a tar of one sample."""
    return make_tar([{"__key__": key, "txt": b"text"}])


@dataclass(frozen=True, slots=True)
class Versions:
    """An object of which there are two versions.

    Attributes:
        url: of the object, and so of its present version.
        first: url of the version that was replaced.
        second: url of the present version.
    """

    bucket: Bucket
    url: str
    first: str
    second: str


@pytest.fixture
def versions(moto: Bucket) -> Versions:
    """An object with two versions in a bucket that keeps both."""
    client = moto.server.client
    client.put_bucket_versioning(Bucket=moto.name, VersioningConfiguration={"Status": "Enabled"})
    ids = [put(moto, "train/a.tar", tar_of(key)) for key in ("first", "second")]
    url = f"{moto.url}/train/a.tar"
    first, second = (f"{url}?versionId={each}" for each in ids)
    return Versions(moto, url, first, second)


def put(bucket: Bucket, key: str, body: bytes) -> str:
    """Store an object; return the id of this version."""
    answer = bucket.server.client.put_object(Bucket=bucket.name, Key=key, Body=body)
    return str(answer["VersionId"])


@pytest.fixture
def daemon(tmp_path: Path, versions: Versions) -> Iterator[Daemon]:
    """A daemon with the credentials of the bucket."""
    with Daemon(tmp_path, env=versions.bucket.env()) as daemon:
        yield daemon


def read(url: str | list[str], daemon: Daemon) -> list[str]:
    """Return the keys of a dataset's samples."""
    return keys_of(ShardDataset(url, shuffle=False, socket=daemon.socket))


def test_each_version_is_a_shard_of_its_own(versions: Versions, daemon: Daemon) -> None:
    """A version is read though another has replaced it, in any order, and cached next to it."""
    assert read(versions.url, daemon) == ["second"]
    assert read([versions.first, versions.second, versions.first], daemon) == [
        "first",
        "second",
        "first",
    ]
    daemon.await_publication()
    assert sorted(daemon.whole()) == sorted([versions.url, versions.first, versions.second])


def test_version_is_read_as_a_file_by_its_objects_name(
    versions: Versions, daemon: Daemon, tmp_path: Path
) -> None:
    """By `open_cached`, fsspec and `get`; the id is no part of the file's name."""
    with open_cached(versions.first, socket=daemon.socket) as file:
        assert file.read() == tar_of("first")
    with fsspec.open(
        f"shardcache::{versions.first}", shardcache={"socket": str(daemon.socket)}
    ) as file:
        assert file.read() == tar_of("first")
    (tmp_path / "to").mkdir()
    ran = shardcache("get", versions.first, tmp_path / "to", socket=daemon.socket)
    assert ran.code == 0, ran.err
    assert (tmp_path / "to/a.tar").read_bytes() == tar_of("first")


@pytest.mark.slow
def test_samples_of_a_version_are_read_by_number(versions: Versions, daemon: Daemon) -> None:
    """An index lists the url with its version, and `indexed` reads it."""
    index = f"{versions.bucket.url}/train/index.json"
    ran = shardcache("index", versions.first, "-o", index, "--samples", socket=daemon.socket)
    assert ran.code == 0, ran.err
    with ShardDataset(index, socket=daemon.socket).indexed() as samples:
        assert [sample["__key__"] for sample in samples] == ["first"]


@pytest.mark.slow
def test_index_has_versions_and_what_is_beside_it_is_the_present_one(
    versions: Versions, daemon: Daemon
) -> None:
    """An index of another version names shards beside it and the present table of samples."""
    bucket = versions.bucket
    index = f"{bucket.url}/train/index.json"
    ran = shardcache(
        "index",
        versions.url,
        "-o",
        index,
        "--samples",
        "--relative-to",
        f"{bucket.url}/train/",
        socket=daemon.socket,
    )
    assert ran.code == 0, ran.err
    (listed,) = (
        each["VersionId"]
        for each in bucket.server.client.list_object_versions(
            Bucket=bucket.name, Prefix="train/index.json"
        )["Versions"]
    )
    put(bucket, "train/index.json", b"no index")
    selected = ShardDataset(f"{index}?versionId={listed}", socket=daemon.socket).select(
        lambda row: row.key == "second"
    )
    assert keys_of(selected) == ["second"]


@pytest.mark.parametrize(
    "version", first_quick(["0b3aa5e5-0000-4000-8000-000000000000", "deleted"])
)
def test_missing_version_is_an_error_that_says_so(
    version: str, versions: Versions, daemon: Daemon
) -> None:
    """A deleted object is such an error, too. The present version never takes its place."""
    if version == "deleted":
        bucket = versions.bucket
        deleted = bucket.server.client.delete_object(Bucket=bucket.name, Key="train/a.tar")
        version = deleted["VersionId"]
    with pytest.raises(NotFoundError, match="no such version") as caught:
        read(f"{versions.url}?versionId={version}", daemon)
    assert "list-object-versions" in str(caught.value)


@pytest.mark.slow
def test_versions_cannot_be_written(versions: Versions, daemon: Daemon) -> None:
    """An index with a version's url is refused, and the object stays as it is."""
    place = f"{versions.bucket.url}/index.json?versionId=1"
    ran = shardcache("index", versions.url, "-o", place, socket=daemon.socket)
    assert ran.code != 0
    assert "a version of an object cannot be written" in ran.err
