"""Memory for the page cache, by the files of real kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.store.disk.memory import Memory, own_cgroup

MIB = 1024**2
GIB = 1024**3

MEMINFO = """\
MemTotal:       24684092 kB
MemFree:        24101228 kB
MemAvailable:   24039480 kB
Buffers:            2444 kB
Cached:           126904 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""

STAT = """\
anon 104857600
file 524288000
kernel 20971520
shmem 209715200
inactive_anon 0
active_anon 314572800
inactive_file 209715200
active_file 104857600
slab_reclaimable 10485760
slab_unreclaimable 5242880
"""


def lay_out(root: Path, cgroup: str, limits: dict[str, str]) -> Memory:
    """Write /proc and /sys/fs/cgroup of a process in `cgroup`, with these memory.max by folder, and read them."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(cgroup)
    cgroups.mkdir()
    for folder, limit in limits.items():
        place = cgroups / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in (("memory.max", f"{limit}\n"), ("memory.current", f"{800 * MIB}\n"), ("memory.stat", STAT)):
            (place / name).write_text(text)
    return Memory.read(proc, cgroups)


def test_machine_without_cgroups_has_what_the_kernel_calls_available(tmp_path: Path) -> None:
    """MemAvailable of MemTotal, in bytes."""
    assert lay_out(tmp_path, "0::/\n", {}) == Memory(24684092 * 1024, 24039480 * 1024)


def test_cgroup_counts_pages_of_files_as_available() -> None:
    """Files' pages can go for others; those of tmpfs, which are counted under `file` too, cannot."""
    assert Memory.of_cgroup(f"{GIB}\n", f"{800 * MIB}\n", STAT) == Memory(GIB, (1024 - 800 + 200 + 100 + 10) * MIB)


def test_container_has_the_limit_of_its_cgroup(tmp_path: Path) -> None:
    """Where the cgroup's own folder is the root of what the container sees, its limit holds."""
    assert lay_out(tmp_path, "0::/\n", {".": str(GIB)}).limit_bytes == GIB


@pytest.mark.parametrize(
    ("limits", "limit_bytes"),
    [
        ({"a/b": str(GIB), "a": "max"}, GIB),
        ({"a/b": "max", "a": str(2 * GIB)}, 2 * GIB),
        ({"a/b": str(4 * GIB), "a": str(2 * GIB)}, 2 * GIB),
        ({"a/b": "max", "a": "max"}, 24684092 * 1024),
        ({"a/b": str(900 * GIB)}, 24684092 * 1024),
        ({"other": str(GIB)}, 24684092 * 1024),
    ],
)
def test_tightest_limit_of_all_levels_holds(limits: dict[str, str], limit_bytes: int, tmp_path: Path) -> None:
    """A service is held by its own limit, that of each cgroup above it, and the machine's memory."""
    assert lay_out(tmp_path, "12:memory:/ignored\n0::/a/b\n", limits).limit_bytes == limit_bytes


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/system.slice/shardcache.service\n", "system.slice/shardcache.service"),
        ("9:name=systemd:/\n4:memory:/docker/d522\n0::/\n", ""),
        ("4:memory:/docker/d522\n", ""),
    ],
)
def test_own_cgroup_is_that_of_version_2(text: str, path: str) -> None:
    """The hierarchies of version 1, listed beside it, are not looked at."""
    assert own_cgroup(text) == path


@pytest.mark.parametrize(("available_bytes", "spare_bytes"), [(50, 40), (10, 0), (5, 0)])
def test_memory_is_short_below_a_tenth(available_bytes: int, spare_bytes: int) -> None:
    """A tenth of the limit is left to others; without more than that, nothing is to spare."""
    assert Memory(100, available_bytes).spare_bytes == spare_bytes


def test_this_machine_can_be_read() -> None:
    """The kernel that the tests run on tells what is needed, and numbers that fit together."""
    memory = Memory.read()
    assert 0 < memory.available_bytes <= memory.limit_bytes
