"""The files of a private daemon."""

from pathlib import Path

import pytest

from shardcache.errors import DaemonError
from shardcache.shared.private import PrivatePlace


def test_cache_folder_that_vanished_is_a_typed_error(tmp_path: Path) -> None:
    """The error names the cache folder; the folder of the sockets has no fault."""
    place = PrivatePlace(tmp_path, "name")
    with pytest.raises(
        DaemonError, match=f"the cache folder {tmp_path}/gone cannot be used"
    ) as caught:
        place.record_cache(tmp_path / "gone")
    assert caught.value.remedy == "try again"
    assert list(tmp_path.iterdir()) == []
