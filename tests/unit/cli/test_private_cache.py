"""cli/starting/private_cache.py: removal of private daemons' cache folders, and its time."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from shardcache.cli.starting.private_cache import free_folder, remove_old_caches

DAY_S = 86_400.0
# digests of credentials
OWN = "a" * 16
OTHER = "b" * 16


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The cache folder of the daemon that removes others."""
    return free_folder(tmp_path, OWN)


def unused(folder: Path, days: float) -> Path:
    """Return a folder that was last used some days ago."""
    folder.mkdir(mode=0o700, exist_ok=True)
    then_s = time.time() - days * DAY_S
    os.utime(folder, (then_s, then_s))
    return folder


def test_caches_that_were_not_used_for_a_day_are_removed(tmp_path: Path, own: Path) -> None:
    """Those of other credentials; other files in the same folder stay."""
    unused(own, 3)
    old = unused(tmp_path / OTHER, 1.1)
    second_old = unused(tmp_path / f"{OTHER}.1", 1.1)
    recent = unused(tmp_path / ("c" * 16), 0.9)
    foreign = unused(tmp_path / "datasets", 3)
    remove_old_caches(own)
    assert not old.exists()
    assert not second_old.exists()
    assert recent.exists()
    assert foreign.exists()
    assert own.exists()


def test_cache_with_recent_transfers_is_kept(tmp_path: Path, own: Path) -> None:
    """A transfer changes only the folder of the partial shards."""
    other = tmp_path / OTHER
    other.mkdir(mode=0o700)
    (other / "partial").mkdir()
    unused(other, 3)
    remove_old_caches(own)
    assert other.exists()


def test_cache_that_a_daemon_uses_is_kept(tmp_path: Path, own: Path) -> None:
    """The daemon may have had nothing to do for days."""
    other = unused(tmp_path / OTHER, 3)
    fd = os.open(other, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        remove_old_caches(own)
        assert other.exists()
    finally:
        os.close(fd)


def test_cache_that_was_chosen_for_a_start_is_kept(tmp_path: Path, own: Path) -> None:
    """Its daemon has not locked it yet, and no daemon has used it for days, as on a Monday."""
    unused(tmp_path / OTHER, 3)
    chosen = free_folder(tmp_path, OTHER)
    remove_old_caches(own)
    assert chosen.exists()
