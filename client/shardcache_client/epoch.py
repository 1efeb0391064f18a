"""The epoch's number where every process that reads a dataset sees it, also workers that outlive the epoch."""

from __future__ import annotations

import os
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

_BYTES = 8


class SharedEpoch:
    """An integer shared with forked and spawned children.

    It lives in a memfd: a file without a name, gone with the last process that holds it, however that ends. A copy
    that is pickled for any other purpose than starting a process takes the value along and is a number of its own.
    """

    def __init__(self, value: int = 0) -> None:
        self._own(os.memfd_create("shardcache-epoch"))
        self.set(value)

    def __repr__(self) -> str:
        return f"SharedEpoch({self.get()})"

    def _own(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def get(self) -> int:
        """Return what was last set, by any process."""
        return int.from_bytes(os.pread(self._fd, _BYTES, 0), "little")

    def set(self, value: int) -> None:
        """Set the number for all processes; 0 to 2**64 - 1."""
        os.pwrite(self._fd, value.to_bytes(_BYTES, "little"), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return SharedEpoch, (self.get(),)
        return _attach, (DupFd(self._fd),)


def _attach(duplicate: Any) -> SharedEpoch:
    epoch = SharedEpoch.__new__(SharedEpoch)
    epoch._own(duplicate.detach())
    return epoch
