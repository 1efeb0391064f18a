"""Places of the files that `shardcache get` makes: below its folder, and no others."""

import pytest

from shardcache.cli.getting.wanted_files import _base_of, _names_below
from shardcache.errors import ConfigError


@pytest.mark.parametrize(
    "key", ["../a", "a/../../b", "/etc/passwd", "a//b", "./a", "a/.", "a\0b", ""]
)
def test_key_that_is_no_path_below_the_folder_is_refused(key: str) -> None:
    """Whatever the store or an index says."""
    with pytest.raises(ConfigError):
        _names_below(f"s3://bucket/model/{key}", "s3://bucket/model/")
    assert _names_below("s3://bucket/model/..a/b", "s3://bucket/model/") == ("..a", "b")
    assert _names_below("https://host/a/b.bin?sig=x/../y", "https://host/a/") == ("b.bin",)


def test_folders_of_braces_are_kept() -> None:
    """Of stores and of web servers; the files would overwrite each other otherwise."""
    assert _base_of("s3://bucket/model/{a,b}/x.tar") == "s3://bucket/model/"
    assert _base_of("https://host/model/{a,b}/x.tar?sig={1}/2") == "https://host/model/"
    assert _base_of("https://host/model/x.tar?sig=1/2") == "https://host/model/"
