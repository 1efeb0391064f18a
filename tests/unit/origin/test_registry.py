"""The registry of origins: what it loads, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardcache.config import OriginTable
from shardcache.errors import ConfigError
from shardcache.origin.registry import Origins


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """A daemon that starts does not pay for SDKs; checked in an interpreter of its own."""
    code = (
        "import sys, shardcache.origin.listing, shardcache.fetch.download\n"
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
    tables = [OriginTable.model_validate({"match": match}) for match in ("s3://a/", "s3://a/b/", "s3://")]
    origins = Origins(tables, max_connections=4)
    urls = ("s3://a/b/x.tar", "s3://a/x.tar", "s3://z/x.tar", "gs://a/x.tar")
    assert [origins.rule(url).match for url in urls] == ["s3://a/b/", "s3://a/", "s3://", ""]


@pytest.mark.parametrize("url", ["s3://allowed/../secret/a.tar", "a.tar", ""])
def test_a_url_that_could_mislead_has_no_origin(url: str) -> None:
    """Every read and listing comes through here, so none can climb out of an allowed prefix."""
    with pytest.raises(ConfigError):
        Origins([], max_connections=1).origin(url)
