"""What users may have fetched with the daemon's rights."""

from __future__ import annotations

import os

import pytest

from shardcache.cache.allow import AllowList
from shardcache.errors import NotAllowedError

ME = os.getuid()
SOMEBODY = 54321


@pytest.mark.parametrize("url", ["s3://data/a.tar", "s3://data", "s3://other/train-000.tar"])
def test_urls_below_a_prefix_are_allowed(url: str) -> None:
    """A bucket opens what is in it, a longer prefix what begins so."""
    AllowList(["s3://data", "s3://other/train-"]).check(url, SOMEBODY)


@pytest.mark.parametrize(
    "url",
    ["s3://data-private/a.tar", "s3://other/val-000.tar", "http://data/a.tar", "s3://data/../private/a.tar"],
)
def test_everything_else_is_refused(url: str) -> None:
    """A bucket's name is no prefix of another bucket's, and no url climbs out."""
    with pytest.raises(NotAllowedError) as caught:
        AllowList(["s3://data", "s3://other/train-"]).check(url, ME)
    assert caught.value.url == url


@pytest.mark.parametrize("url", ["file:///etc/secret.tar", "/etc/secret.tar", "LOCAL:///etc/secret.tar"])
def test_other_users_get_no_local_files_by_default(url: str) -> None:
    """The daemon may read what its users may not; only an explicit prefix opens local files to them."""
    AllowList([]).check(url, ME)
    with pytest.raises(NotAllowedError):
        AllowList([]).check(url, SOMEBODY)


def test_an_encoded_climb_is_a_climb() -> None:
    """%2e%2e is '..' to the server at the other end."""
    with pytest.raises(NotAllowedError):
        AllowList(["http://host/data/"]).check("http://host/data/%2e%2e/private.tar", ME)
