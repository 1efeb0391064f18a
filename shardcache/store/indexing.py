"""Shard indexing in a separate process: walking a tar of small members, or its index, would hold the daemon's GIL.

As a program it reads one JSON request per line from standard input and writes one JSON answer per line; it exits at the
end of its input, hence with the daemon, however that ends. `Indexers` is the other side. Imports are kept small, since
every such process pays for them.
"""

import ctypes
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcache.errors import ShardcacheError
from shardcache.store.disk import disk_errors
from shardcache.tarindex import contents, grouping, tables

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class IndexRequest:
    """A request to index a tar."""

    tar: str  # path to read
    sidecar: str  # path to write
    header: dict[str, Any]  # of the sidecar, complete except for the number of samples
    url: str  # for error messages
    require_end: bool  # reject a tar without an end-of-archive block
    allowed_bytes: int  # maximum size of the sidecar
    ignore_trailing_data: bool = False  # accept a tar with data after the end-of-archive block
    require_adjacent: bool = True  # reject a tar in which a key comes again with other members


@dataclass(frozen=True, slots=True)
class Indexed:
    """The result of indexing; `written` is False if the sidecar would exceed the allowed size."""

    samples: int
    sidecar_bytes: int
    written: bool


@dataclass(frozen=True, slots=True)
class TokensRequest:
    """A request to count the tokens in a member, as `TokenMember.parse` takes it, of a published shard."""

    tar: str
    sidecar: str
    url: str
    member: str


def count_tokens(request: TokensRequest) -> int:
    """Return the number of tokens in a shard. Blocks. Raises TokensError, CorruptShardError, DiskError."""
    member = contents.TokenMember.parse(request.member)
    with disk_errors(Path(request.tar)), open(request.tar, "rb", buffering=0) as tar:
        index = tables.TarIndex.open(Path(request.sidecar))
        try:
            return contents.find_tokens(index, _File(tar.fileno()), member, request.url).tokens
        finally:
            index.close()


@dataclass(frozen=True, slots=True)
class _File:
    """The bytes of an open file, read when asked for: a bad sector is an error here, and a signal in a map."""

    fd: int

    def __getitem__(self, run: slice) -> bytes:
        return os.pread(self.fd, run.stop - run.start, run.start)


def index_shard(request: IndexRequest) -> Indexed:
    """Walk a tar to its end and write its sidecar. Blocks. Raises ShardError, DiskError."""
    sidecar = Path(request.sidecar)
    with disk_errors(sidecar):
        samples = grouping.index_tar(
            Path(request.tar),
            request.url,
            require_end=request.require_end,
            ignore_trailing_data=request.ignore_trailing_data,
            require_adjacent=request.require_adjacent,
        )
        header = request.header | {"samples": len(samples)}
        sidecar_bytes = tables.write(sidecar, header, samples, request.allowed_bytes)
    return Indexed(len(samples), sidecar_bytes, sidecar_bytes <= request.allowed_bytes)


def write_bare(sidecar: Path, header: dict[str, Any]) -> None:
    """Write the sidecar of a file without samples. Blocks. Raises DiskError."""
    with disk_errors(sidecar):
        tables.write(sidecar, header, tables.Samples())


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, with pid `parent`, is killed (prctl(2)).

    The next daemon may index the same shard: this process must not be writing the same file by then.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # an answer without a reader is not an error
    if os.getppid() != parent:  # the parent died before that call
        sys.exit()


def _answer(fields: dict[str, Any]) -> dict[str, Any]:
    if "member" in fields:
        return {"tokens": count_tokens(TokensRequest(**fields))}
    return asdict(index_shard(IndexRequest(**fields)))


def main() -> None:
    """Answer requests until the input ends; the only argument is the daemon's pid."""
    end_with_parent(int(sys.argv[1]))
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except ShardcacheError as exn:
            answer = {"error": exn.to_json()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
