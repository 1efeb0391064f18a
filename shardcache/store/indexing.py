"""Indexing a shard in a process of its own: walking a tar of small members would hold the daemon's interpreter.

As a program it reads a request a line from its standard input and writes an answer a line, both JSON; it ends when
the input does, hence with the daemon, however that ends. `Indexers` is the other side. What is imported here is
small, for every such process imports it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcache import tarindex
from shardcache.errors import ShardcacheError
from shardcache.store.files import disk_errors

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What to index.

    Attributes:
        tar, sidecar: paths of what there is and of what to write.
        header: of the sidecar, complete but for the number of samples.
        url: for errors.
        require_end: refuse a tar that lacks the end-of-archive block.
        allowed_bytes: most that the sidecar may take.
        ignore_trailing_data: accept a tar with data behind the end-of-archive block.
    """

    tar: str
    sidecar: str
    header: dict[str, Any]
    url: str
    require_end: bool
    allowed_bytes: int
    ignore_trailing_data: bool = False


@dataclass(frozen=True, slots=True)
class Indexed:
    """What came of it.

    Attributes:
        samples: number of samples.
        sidecar_bytes: size of the sidecar.
        written: False where the sidecar is larger than was allowed and does not exist.
    """

    samples: int
    sidecar_bytes: int
    written: bool


def index_shard(request: Request) -> Indexed:
    """Walk a tar to its end and write its sidecar. Blocks.

    Raises ShardError when the tar cannot be served, DiskFullError or CacheDirError when the cache's disk fails.
    """
    sidecar = Path(request.sidecar)
    with disk_errors(sidecar):
        samples = tarindex.index_tar(
            Path(request.tar),
            request.url,
            require_end=request.require_end,
            ignore_trailing_data=request.ignore_trailing_data,
        )
        header = request.header | {"samples": len(samples)}
        sidecar_bytes = tarindex.write(sidecar, header, samples, request.allowed_bytes)
    return Indexed(len(samples), sidecar_bytes, sidecar_bytes <= request.allowed_bytes)


def _end_with(parent: int) -> None:
    """Have the kernel end this process in mid-work when the daemon, whose pid that is, is killed (prctl(2)).

    The next daemon may index the same shard: the file under its name must not be this one's any more.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an answer that nobody reads is no error
    if os.getppid() != parent:  # it was killed before that call
        sys.exit()


def main() -> None:
    """Answer requests until there are no more; the only argument is the pid of who makes them."""
    _end_with(int(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = asdict(index_shard(Request(**json.loads(line))))
        except ShardcacheError as exn:
            answer = {"error": exn.to_json()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
