"""How much memory there is for the page cache: the machine's, or less where a cgroup holds this process short.

Pages of files are charged to the cgroup of whoever brings them in, and for shards that is the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

# What stays free for everyone else: below it the kernel is busy looking for pages to take.
_RESERVE = 0.1


@dataclass(frozen=True, slots=True)
class Memory:
    """What one limit leaves for files.

    Attributes:
        limit_bytes: all memory under that limit.
        available_bytes: what is free and what files hold, which goes when something else needs it.
    """

    limit_bytes: int
    available_bytes: int

    @classmethod
    def read(cls, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> Self:
        """Return the tightest of the machine's memory and that of each cgroup v2 around this process. Blocks."""
        machine = cls.of_meminfo((proc / "meminfo").read_text())
        return min((machine, *cls._of_cgroups(proc, cgroup_root)), key=lambda memory: memory.spare_bytes)

    @classmethod
    def _of_cgroups(cls, proc: Path, root: Path) -> Iterator[Self]:
        own = root / own_cgroup((proc / "self" / "cgroup").read_text())
        for folder in (own, *own.parents[: len(own.relative_to(root).parts)]):
            try:
                texts = [(folder / name).read_text() for name in ("memory.max", "memory.current", "memory.stat")]
            except FileNotFoundError:  # the root of all, or a hierarchy without memory in it
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
        # Not "file": that counts tmpfs too, which nothing can take back.
        in_files = fields["active_file"] + fields["inactive_file"] + fields["slab_reclaimable"]
        return cls(int(limit), max(0, int(limit) - int(current) + in_files))

    @property
    def spare_bytes(self) -> int:
        """What files may fill before memory is short."""
        return max(0, self.available_bytes - int(self.limit_bytes * _RESERVE))


def own_cgroup(text: str) -> str:
    """Return the cgroup v2 that /proc/self/cgroup names, relative to the root; empty for the root or without one."""
    paths = (line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::"))
    return next(paths, "").strip("/")
