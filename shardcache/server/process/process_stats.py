"""Resource usage of the daemon's process: figures that return to their baseline once readers disconnect."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

_SELF = Path("/proc/self")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def process_stats() -> dict[str, int]:
    """Return the open file descriptors, threads, tasks of the running event loop and resident memory; see proc(5)."""
    return {
        "fds": _count(_SELF / "fd") - 1,  # without the one that lists the folder
        "threads": _count(_SELF / "task"),
        "tasks": len(asyncio.all_tasks()),
        "rss_bytes": int((_SELF / "statm").read_text().split()[1]) * _PAGE_BYTES,
    }


def _count(folder: Path) -> int:
    return len(os.listdir(folder))  # noqa: PTH208  # no Path object per entry: this runs on the event loop
