"""Filesystem of a path, by lines of mountinfo."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.store.disk import Mount, mount_of

TABLE = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
    "30 22 0:40 / /data rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2",
    "31 22 259:1 / /data rw,relatime - xfs /dev/nvme0n1 rw",
    r"32 22 0:41 / /mnt/two\040words rw - fuse.sshfs me@there: rw",
)


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/nowhere/yet", Mount(Path("/"), "ext4")),
        ("/data/cache", Mount(Path("/data"), "xfs")),
        ("/database", Mount(Path("/"), "ext4")),
        ("/mnt/two words/x", Mount(Path("/mnt/two words"), "fuse.sshfs")),
    ],
)
def test_a_path_is_on_its_nearest_visible_mount(path: str, mount: Mount) -> None:
    """The longest folder that holds the path, whole names only; of two on one folder, the later hides the earlier."""
    assert mount_of(Path(path), TABLE) == mount
