"""The registry of origins: its loading, a tier's breaker, and owners left out."""

import subprocess
import sys

import pydantic
import pytest

from shardcache.config.origin_table import OriginTable
from shardcache.errors import ConfigError
from shardcache.origin.breaker import Breaker
from shardcache.origin.registry import Origins
from shardcache.origin.tier.slow_owners import SlowOwners


@pytest.mark.slow
def test_sdks_are_imported_on_first_use() -> None:
    """A daemon that starts does not pay for SDKs; checked in an interpreter of its own."""
    code = (
        "import sys, shardcache.origin.patterns.expansion, shardcache.fetch.download\n"
        "print(sorted({'s3fs', 'botocore', 'aiobotocore', 'aiohttp', 'fsspec'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


async def test_an_origin_serves_all_urls_of_its_protocol_and_table() -> None:
    """Connections are shared as widely as the options allow, and no wider."""
    table = OriginTable.model_validate({"match": "s3://lab/", "anon": True})
    origins = Origins([table], max_connections=4)
    lab = origins.origin("s3://lab/a.tar")
    assert origins.origin("s3://lab/b/") is lab
    assert origins.origin("s3://other/a.tar") is not lab
    assert origins.origin("/data/a.tar") is origins.origin("file:///data/b.tar")
    await origins.close()


def test_the_longest_match_rules() -> None:
    """Tables may nest in any order; where none matches the defaults hold."""
    tables = [
        OriginTable.model_validate({"match": match}) for match in ("s3://a/", "s3://a/b/", "s3://")
    ]
    origins = Origins(tables, max_connections=4)
    urls = ("s3://a/b/x.tar", "s3://a/x.tar", "s3://z/x.tar", "gs://a/x.tar")
    assert [origins.table(url).match for url in urls] == ["s3://a/b/", "s3://a/", "s3://", ""]


@pytest.mark.parametrize("match", ["", "s3", "s3://", "S3A://lab/"])
def test_s3_settings_are_accepted_where_s3_urls_match(match: str) -> None:
    """A prefix without a protocol may be of urls of several."""
    table = OriginTable.model_validate({"match": match, "region": "eu-west-1", "profile": "lab"})
    assert table.region == "eu-west-1"


@pytest.mark.parametrize(
    ("match", "name", "value"),
    [
        ("https://data/", "anon", True),
        ("oss://lab/", "endpoint_url", "http://x"),
        ("az://lab/", "profile", "lab"),
    ],
)
def test_settings_of_other_protocols_are_refused(match: str, name: str, value: object) -> None:
    """They would be ignored."""
    with pytest.raises(pydantic.ValidationError, match=f"(?s){name}.*has no such setting"):
        OriginTable.model_validate({"match": match, name: value})


@pytest.mark.parametrize("url", ["s3://allowed/../secret/a.tar", "a.tar", ""])
def test_a_url_that_could_mislead_has_no_origin(url: str) -> None:
    """Every read and listing comes through here, so none can climb out of an allowed prefix."""
    with pytest.raises(ConfigError):
        Origins([], max_connections=1).origin(url)


def test_failures_or_two_stalls_in_a_row_open_it() -> None:
    """A success in between starts the count again; a stall and a quick failure are not enough."""
    breaker = Breaker(max_failures=3, pause_s=10)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(0.0)
    assert not breaker.is_open
    assert breaker.admit(0.0)
    breaker.failed(0.0)
    assert breaker.is_open
    assert not breaker.admit(9.9)
    other = Breaker(max_failures=16)
    other.failed(0.0)
    other.failed(20.0, stalled=True)
    assert not other.is_open
    other.failed(40.0, stalled=True)
    assert other.is_open


def test_an_open_breaker_admits_one_probe_per_rest() -> None:
    """A lost probe costs a rest, as a failure does; a success closes the breaker."""
    breaker = Breaker(max_failures=1, pause_s=10)
    breaker.failed(0.0)
    assert [breaker.admit(now_s) for now_s in (5.0, 10.0, 10.1, 19.9, 20.0)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    breaker.failed(25.0)
    assert [breaker.admit(now_s) for now_s in (30.1, 34.9, 35.0)] == [False, False, True]
    breaker.succeeded()
    assert all(breaker.admit(35.0) for _ in range(100))


def test_an_owner_that_was_slow_twice_within_the_rest_is_left_out_for_it() -> None:
    """Others are not, nor is one that is slow now and then."""
    owners = SlowOwners(pause_s=60)
    for now_s in (0.0, 61.0):
        owners.record("a", now_s)
    assert not owners.is_any_left_out(61.0)
    owners.record("a", 70.0)
    assert owners.is_left_out("a", 129.9)
    assert owners.is_any_left_out(129.9)
    assert not owners.is_left_out("b", 70.0)
    assert not owners.is_left_out("a", 130.0)
    assert not owners.is_any_left_out(130.0)
