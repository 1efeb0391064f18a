"""What the daemon's process takes of the machine: figures that come back to where they were when readers have gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

_SELF = Path("/proc/self")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def vitals() -> dict[str, int]:
    """Return open file descriptors, threads, tasks of the running event loop and resident memory, see proc(5)."""
    return {
        "fds": _count(_SELF / "fd") - 1,  # the one by which the folder is listed
        "threads": _count(_SELF / "task"),
        "tasks": len(asyncio.all_tasks()),
        "rss_bytes": int((_SELF / "statm").read_text().split()[1]) * _PAGE_BYTES,
    }


def _count(folder: Path) -> int:
    return len(os.listdir(folder))  # noqa: PTH208  # without a path for each: it is done on the event loop
