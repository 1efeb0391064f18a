"""Runs `shardcache` so that it stops with the process that started it, however that one ends.

    python -m shardcache_client.ray.tether PARENT_PID serve --cache-dir …

The kernel sends SIGTERM when the parent's starting thread ends, even by SIGKILL; the daemon then drains and exits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, and become `shardcache`. Exits with status 1 if the parent has ended already."""
    parent, *args = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        sys.exit(1)  # it ended before the kernel knew
    os.execv(sys.executable, [sys.executable, "-m", "shardcache", *args])


if __name__ == "__main__":
    main()
