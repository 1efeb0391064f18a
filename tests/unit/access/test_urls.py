"""Urls taken apart and put together, and the table of their protocols."""

import importlib
import os

import pytest
from fsspec.registry import known_implementations

from shardcache.access.deceptive import checked
from shardcache.access.protocols import STORES, row_of
from shardcache.access.urls import canonical, is_glob, join
from shardcache.errors import ConfigError
from shardcache.origin.base import Origin
from shardcache.shared.urls.local_urls import absolute_url


def test_a_web_urls_query_is_no_wildcard() -> None:
    """`?` and `[` belong to http urls, and a star in the query to whoever signed it."""
    assert not is_glob("http://[::1]/a.tar?x=1")
    assert not is_glob(
        "https://cdn/a.tar?response-content-disposition=attachment%3B+filename*%3DUTF-8&Signature=x"
    )
    assert is_glob("https://host/*.tar")
    assert is_glob("s3://b/a?.tar")
    assert not is_glob("s3://b/a.tar")


def test_a_version_in_s3_is_no_wildcard() -> None:
    """`?versionId=` names a version in S3 alone, and of a name that has no wildcards."""
    assert not is_glob("s3://b/a.tar?versionId=3HL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY")
    assert not is_glob("S3A://b/a.tar?versionId=null")
    assert is_glob("s3://b/*.tar?versionId=1")
    assert is_glob("s3://b/a.tar?versionId=*")
    assert is_glob("s3://b/a.tar?version=1")
    assert is_glob("gs://b/a.tar?versionId=1")


@pytest.mark.parametrize(
    ("base", "relative", "url"),
    [
        ("s3://b/train/index.json", "a.tar", "s3://b/train/a.tar"),
        ("s3://b/train/index.json", "../val/a.tar", "s3://b/val/a.tar"),
        ("s3://b/train/index.json", "../../../a.tar", "s3://b/a.tar"),
        ("s3://b/train/index.json", "/a.tar", "s3://b/a.tar"),
        ("s3://b/train/index.json?versionId=1", "a.tar", "s3://b/train/a.tar"),
        ("s3://b/index.json", "gs://c/a.tar", "gs://c/a.tar"),
        ("https://host/x/index.json", "y/a.tar", "https://host/x/y/a.tar"),
        ("file:///data/index.json", "a.tar", "file:///data/a.tar"),
        ("/data/index.json", "./a.tar", "/data/a.tar"),
        ("memory://x/index.json", "a.tar", "memory://x/a.tar"),
    ],
)
def test_relative_urls_start_at_the_index(base: str, relative: str, url: str) -> None:
    """An index names its shards beside itself, below its root, or by whole urls."""
    assert join(base, relative) == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/x/../../c/a.tar",
        "file:///data/../etc/shadow",
        "../a.tar",
        "file:///a?/../etc",
        "s3://b/a?/../c",
        "http://h/%2e%2e/a",
        "http://h/..%2fa",
        "http://h/%252e%252e%252fa",
        "http://h/.%2e/a",
        "s3://b/%2e%2e/a",
        "http://h/..;x/a",
        "http://h/a\\..\\b",
        "http://h/%5c..%5ca",
        "s3://b/%" + "25" * 100_000 + "2e./a",
        "data/a.tar",
        "~/a.tar",
        "file://~/a.tar",
        "file:/etc/a.tar",
        "file://etc/a.tar",
        "file://localhost/a.tar",
        "",
        "local://a.tar",
        "s3://b/a\n.tar",
        "s3://b/a\x00.tar",
        "s3://b/\x1b[2J.tar",
        "s3://b/\u202etar.a",
        "s3://b/\ud800",
        " s3://b/a",
        "simplecache::s3://b/a",
        "filecache::file:///etc/a",
        "zip://a::file:///etc/b.zip",
        "reference://a",
        "zip:///etc/a.zip",
        "generic:///etc/a",
        "dir:///etc/a",
        "asynclocal:///etc/a",
        "data:///a",
        "http://user:pw@h/a",
        "https://user@h/a",
        "http://good@evil/a",
        "s3://key:secret@b/a",
        "s3://key:sec/ret@b/a",
        "ftp://u:p@h/a",
        "http://",
        "http:///a",
        "http://h\\@evil/a",
        "http://h./a",
        "http://h:99999/a",
        "http://h:0/a",
        "http://h:/a",
        "http://ｅｖｉｌ/a",
        "http://h。evil/a",
        "http://[::1%25lo]/a",
        "http://h h/a",
        "http://h%2eevil/a",
    ],
)
def test_urls_that_could_mislead_are_refused(url: str) -> None:
    """Climbs, working folders, urls in urls, credentials and ambiguous hosts are refused."""
    with pytest.raises(ConfigError):
        checked(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a.tar",
        "s3://b/ä €.tar",
        "s3://arn:aws:s3:us-east-1:1:accesspoint/x/a",
        "gs://b/...a/..b/a..",
        "/data/a",
        "http://[::1]:80/a",
        "https://h-1.example.com:8443/a%20b.tar?x=../y#z",
        "http://h{1..3}/a",
        "s3://{a,b}/a",
        "abfss://container@account.dfs.core.windows.net/a",
        "github://org:repo@sha/a",
        "hf://datasets/a/b@main/c",
    ],
)
def test_honest_urls_pass(url: str) -> None:
    """Nothing that people store shards under is taken for an attack."""
    assert checked(url) == url


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("/data/a", "file:///data/a"),
        ("LOCAL:///data/A", "file:///data/A"),
        ("s3a://B/K", "s3://B/K"),
        ("HTTP://Host:80/Path", "http://host/Path"),
        ("https://h:80/", "https://h:80/"),
        ("http://h", "http://h"),
    ],
)
def test_two_spellings_of_one_place_are_compared_as_one(url: str, same: str) -> None:
    """Schemes, web hosts and their usual ports; nothing of a path."""
    assert canonical(url) == same


def test_an_absolute_path_needs_no_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process whose folder was removed, absolute paths and urls are as they were."""

    def removed() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", removed)
    assert absolute_url("file:/data/a.tar") == "/data/a.tar"


@pytest.mark.parametrize("protocol", ["s3", "https", "file", "gs", "smb", "git"])
def test_each_row_names_an_origin(protocol: str) -> None:
    """The class that a row names exists, and is an `Origin`."""
    module, _, name = row_of(protocol).origin.partition(":")
    assert Origin in getattr(importlib.import_module(module), name).__mro__


@pytest.mark.parametrize(
    "protocol", sorted(known_implementations.keys() & STORES - set(row_of("s3").names))
)
def test_the_package_of_a_store_is_the_one_that_fsspec_imports(protocol: str) -> None:
    """`pip install` of the package brings the filesystem that fsspec wants."""
    wanted = known_implementations[protocol]["class"].partition(".")[0]
    assert row_of(protocol).package.replace("-", "_") == wanted
