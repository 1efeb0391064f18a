"""Memory available to the page cache: the machine's, or less if a cgroup limits this process.

Page cache pages are charged to the cgroup of the process that first reads or writes them; for shards, the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# Fraction kept free for everyone else: below it the kernel spends its time reclaiming pages.
_RESERVE = 0.1


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory under one limit, the machine's or a cgroup's.

    Attributes:
        limit_bytes: the limit.
        available_bytes: free memory, including page cache that can be reclaimed.
    """

    limit_bytes: int
    available_bytes: int

    @classmethod
    def read(cls, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> Self:
        """Return the tightest limit among the machine and the cgroups v2 that contain this process. Blocks."""
        machine = cls.of_meminfo((proc / "meminfo").read_text())
        return min((machine, *cls._of_cgroups(proc, cgroup_root)), key=lambda memory: memory.spare_bytes)

    @classmethod
    def _of_cgroups(cls, proc: Path, root: Path) -> Iterator[Self]:
        own = root / own_cgroup((proc / "self" / "cgroup").read_text())
        for folder in (own, *own.parents[: len(own.relative_to(root).parts)]):
            try:
                texts = [(folder / name).read_text() for name in ("memory.max", "memory.current", "memory.stat")]
            except FileNotFoundError:  # the root cgroup, or one without the memory controller
                continue
            if texts[0].strip() != "max":
                yield cls.of_cgroup(*texts)

    @classmethod
    def of_meminfo(cls, text: str) -> Self:
        """Parse /proc/meminfo."""
        fields = {name: int(value.split()[0]) for name, _, value in (row.partition(":") for row in text.splitlines())}
        return cls(fields["MemTotal"] * 1024, fields["MemAvailable"] * 1024)

    @classmethod
    def of_cgroup(cls, limit: str, current: str, stat: str) -> Self:
        """Parse memory.max (a number), memory.current and memory.stat of one cgroup v2."""
        fields = {name: int(value) for name, value in map(str.split, stat.splitlines())}
        # Not "file": it includes tmpfs, which cannot be reclaimed.
        in_files = fields["active_file"] + fields["inactive_file"] + fields["slab_reclaimable"]
        return cls(int(limit), max(0, int(limit) - int(current) + in_files))

    @property
    def spare_bytes(self) -> int:
        """Bytes that file pages may still fill before memory becomes short."""
        return max(0, self.available_bytes - int(self.limit_bytes * _RESERVE))


def own_cgroup(text: str) -> str:
    """Return the cgroup v2 in /proc/self/cgroup, relative to the root; empty for the root, or if there is none."""
    paths = (line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::"))
    return next(paths, "").strip("/")
