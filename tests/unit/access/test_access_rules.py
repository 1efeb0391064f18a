"""Rules of what users may request with the daemon's rights, and see."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from shardcache.access.rules import AllowList, AllowRule, Peer
from shardcache.errors import ConfigError, NotAllowedError

ME = Peer(os.getuid())
SOMEBODY = Peer(54321, frozenset({600}))


def allow(*entries: str | dict[str, Any]) -> AllowList:
    """Return the rules that a config file's `allow` makes."""
    return AllowList([AllowRule.parse(entry) for entry in entries])


@pytest.mark.parametrize(
    ("urls", "allowed"),
    [
        (
            [
                "s3://data/a.tar",
                "s3://data",
                "s3://other/train-000.tar",
                "S3://data/a.tar",
                "s3a://data/a.tar",
            ],
            True,
        ),
        (["HTTPS://Host:443/x/a.tar", "https://host/x/a b.tar?versionId=1"], True),
        (
            [
                "s3://data-private/a.tar",
                "s3://other/val-000.tar",
                "http://data/a.tar",
                "s3://Data/a.tar",
            ],
            False,
        ),
        (
            [
                "http://host/x/a.tar",
                "https://host:8443/x/a.tar",
                "https://host.evil/x/a.tar",
                "https://host/X/a",
            ],
            False,
        ),
        (["ftp://files.evil/a"], False),
        (["hf://any/a.tar"], True),  # there is no bucket's name in a rule for a protocol
        (["gs://any/a.tar"], False),
    ],
)
def test_urls_below_a_prefix_are_allowed_and_no_others(urls: list[str], allowed: bool) -> None:
    """A bucket or longer prefix opens what begins so, and never another bucket or host."""
    rules = allow("s3://data", "s3://other/train-", "https://host/x/", "ftp://files", "hf://")
    for url in urls:
        for peer in (ME, SOMEBODY):
            with nullcontext() if allowed else pytest.raises(NotAllowedError):
                rules.check(url, peer)


def test_prefix_may_end_in_the_middle_of_a_name_that_begins_with_dots() -> None:
    """Rules hold for it as it is, and a folder `..` in it is refused as in a url."""
    allow("s3://data").check_prefix("s3://data/x/..", SOMEBODY)
    with pytest.raises(NotAllowedError):
        allow("s3://data/...").check_prefix("s3://data/..", SOMEBODY)
    with pytest.raises(ConfigError, match="must not contain"):
        allow("s3://data").check_prefix("s3://data/../x", SOMEBODY)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        *(
            (url, "/etc/")
            for url in ("file:///etc/secret.tar", "/etc/secret.tar", "LOCAL:///etc/secret.tar")
        ),
        *(
            (f"{name}://host/a.tar", f"{name}://host/")
            for name in ("sftp", "ftp", "smb", "webhdfs", "git", "memory")
        ),
        ("nonsense://host/a.tar", "nonsense://host/"),
    ],
)
def test_other_users_need_a_rule_for_local_files_and_what_is_no_object_store(
    url: str, rule: str
) -> None:
    """The daemon may read what its users may not, and reach hosts with keys that are not theirs."""
    allow().check(url, ME)
    with pytest.raises(NotAllowedError):
        allow().check(url, SOMEBODY)
    allow(rule).check(url, SOMEBODY)


@pytest.mark.parametrize(
    "host", ["127.9.9.9:8000", "LOCALHOST", "[::1]", "[fe80::1]:80", "2852039166", "metadata"]
)
def test_node_itself_is_closed_to_other_users_without_rules(host: str) -> None:
    """Instance metadata gives out credentials, and the loopback trusts all who reach it."""
    for scheme in ("http", "https"):
        with pytest.raises(NotAllowedError):
            allow().check(f"{scheme}://{host}/latest/a.tar", SOMEBODY)
    allow().check(f"http://{host}/latest/a.tar", ME)


def test_other_hosts_need_no_rule() -> None:
    """A file server in the cluster's own network works as it is."""
    private = (
        "10.1.2.3",
        "192.168.1.5:9000",
        "minio",
        "nas.local",
        "ip-10-0-0-5.ec2.internal",
        "files.localdomain",
    )
    for host in ("example.com", "[2606:4700::1111]", *private):
        allow().check(f"http://{host}/a.tar", SOMEBODY)


def test_a_rule_for_users_and_groups_is_for_them_alone() -> None:
    """By number or name; root and the daemon's user have its rights anyway."""
    rules = allow(
        {"prefix": "s3://a/", "users": [54321, "nobody"]},
        {"prefix": "s3://b/", "groups": [601, "root"]},
    )
    for url, peer in [
        ("s3://a/x", SOMEBODY),
        ("s3://a/x", Peer(65534)),
        ("s3://b/x", Peer(7, frozenset({600, 601}))),
        ("s3://b/x", Peer(7, frozenset({0}))),
        ("s3://a/x", ME),
        ("s3://b/x", Peer(0)),
    ]:
        rules.check(url, peer)
    for url, peer in [
        ("s3://a/x", Peer(54322)),
        ("s3://b/x", SOMEBODY),
        ("s3://c/x", SOMEBODY),
        ("s3://c/x", ME),
    ]:
        with pytest.raises(NotAllowedError):
            rules.check(url, peer)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        7,
        {},
        {"prefix": ""},
        {"prefix": "s3://a/", "user": [1]},
        {"prefix": "s3://a/", "users": "alice"},
        *({"prefix": "s3://a/", "users": users} for users in ([], ["no such user"], [True])),
        {"prefix": "s3://a/", "groups": [-1]},
    ],
)
def test_a_rule_that_says_something_else_is_refused(entry: object) -> None:
    """A misspelt key or an unknown name must not open a prefix to everyone."""
    with pytest.raises(ValueError):
        AllowRule.parse(entry)


HOST = "http://host/"
ONE = {"prefix": "http://host/", "users": [1]}


@pytest.mark.parametrize(
    ("entries", "target", "passes"),
    [
        ([], "https://cdn.example.com/a.tar", True),
        ([], "http://169.254.169.254/a.tar", False),
        ([], "http://localhost:8000/a.tar", False),
        ([HOST], "http://host/b.tar", True),
        ([HOST], "http://cdn/b.tar", False),
        ([HOST, "http://cdn/"], "http://cdn/b.tar", True),
        ([HOST, {"prefix": "http://cdn/", "users": [1]}], "http://cdn/b.tar", False),
        ([ONE], "http://host/b.tar", True),
        ([ONE, {"prefix": "http://host/a", "users": [2]}], "http://host/b", False),
        ([ONE, {"prefix": "http://host/a", "groups": [1]}], "http://host/b", False),
        (
            [ONE | {"users": [1, 2]}, {"prefix": "http://host/a", "users": [2]}],
            "http://host/b",
            True,
        ),
        ([HOST, {"prefix": "http://host/a", "users": [2]}], "http://host/b", True),
    ],
)
def test_a_hop_leads_no_further_than_its_source_is_allowed(
    entries: list[Any], target: str, passes: bool
) -> None:
    """Whoever may request a url may follow it to where a server or link leads."""
    with nullcontext() if passes else pytest.raises(NotAllowedError):
        allow(*entries).check_hop("http://host/a.tar", target)


def test_a_link_into_an_allowed_folder_that_is_a_link_is_allowed(tmp_path: Path) -> None:
    """A rule for a folder is one for the place that it leads to, and for no other."""
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "real")
    for prefix in (f"{tmp_path}/data/", f"{tmp_path}/data", f"{tmp_path}/data/a"):
        rules = allow(prefix)
        rules.check_hop(f"file://{tmp_path}/data/a.tar", f"file://{tmp_path.resolve()}/real/a.tar")
        with pytest.raises(NotAllowedError):
            rules.check_hop(f"file://{tmp_path}/data/a.tar", "file:///etc/a.tar")
