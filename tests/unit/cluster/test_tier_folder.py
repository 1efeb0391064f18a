"""Folders of a node's tier."""

from pathlib import Path

import pytest

from shardcache.cluster.tier_folder import make_folder
from shardcache.errors import ConfigError
from support.network.other_user import needs_root


@needs_root
def test_a_user_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """No folder is made that would belong to root."""
    with pytest.raises(ConfigError, match="no-such-user") as raised:
        make_folder(tmp_path / "cache", 0o700, "no-such-user")
    assert "--user" in raised.value.remedy
    assert not (tmp_path / "cache").exists()
