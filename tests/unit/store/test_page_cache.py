"""Bringing files into memory and letting them go, on a real disk."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.store.disk.page_cache import let_go, read_ahead
from support.disks.resident import resident_bytes
from support.programs.daemon import eventually

# More than any usual device reads ahead at one call.
SIZE_BYTES = 24 * 1024 * 1024 + 1
WHOLE_BYTES = -(-SIZE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def filesystem(path: Path) -> str:
    """Return the type of the filesystem that holds `path`."""
    mounts = (line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    types = {Path(mount.split()[4]): kind.split()[0] for mount, kind in mounts}
    return next(types[folder] for folder in (path, *path.parents) if folder in types)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Return a file like a published shard: on the disk, read-only, just written and so in memory."""
    if filesystem(tmp_path.resolve()) in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder lies in memory")
    path = tmp_path / "shard.tar"
    with path.open("wb") as out:
        out.write(os.urandom(SIZE_BYTES))
        os.fsync(out.fileno())
    path.chmod(0o440)
    yield path
    path.unlink(missing_ok=True)


def test_what_was_written_can_be_let_go(file: Path) -> None:
    """All pages of a file that nobody has mapped leave the memory."""
    assert resident_bytes(file) == WHOLE_BYTES
    let_go(file)
    assert resident_bytes(file) == 0


def test_whole_file_is_read_ahead(file: Path) -> None:
    """Every page comes in, also of a file larger than what the kernel reads at one call."""
    let_go(file)
    read_ahead(file)
    eventually(lambda: resident_bytes(file) == WHOLE_BYTES)


def test_pages_that_a_reader_has_mapped_stay(file: Path) -> None:
    """A reader in the middle of a shard keeps what it has touched until it unmaps it."""
    touched_bytes = SIZE_BYTES // 2
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        sum(mapping[0 : touched_bytes : mmap.PAGESIZE])
        let_go(file)
        assert touched_bytes <= resident_bytes(file) < WHOLE_BYTES
    let_go(file)
    assert resident_bytes(file) == 0


def test_file_that_is_gone_or_empty_is_no_error(tmp_path: Path) -> None:
    """Advice comes too late for a shard that was evicted meanwhile; there is nothing of it in memory."""
    (tmp_path / "empty").touch()
    for path in (tmp_path / "gone", tmp_path / "empty"):
        read_ahead(path)
        let_go(path)
        assert resident_bytes(path) == 0
