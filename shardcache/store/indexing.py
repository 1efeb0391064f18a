"""Shard indexing in a separate process: walking a tar of small members, or its index, would hold the daemon's GIL.

As a program it reads one JSON request per line from standard input and writes one JSON answer per line; it exits at the
end of its input, hence with the daemon, however that ends. `HelperProcess` is the other side. Imports are kept small,
since every such process pays for them.
"""

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from shardcache.errors import ShardcacheError
from shardcache.store.disk import disk_errors
from shardcache.tarindex import contents, grouping, tables

_PR_SET_PDEATHSIG = 1
_IN, _OUT = 0, 1
_READ_BYTES = 64 * 1024
_writing = threading.Lock()


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


def requests() -> Iterator[Any]:
    """Yield the JSON values that arrive, one a line, until the input ends; pings are answered in a thread of its own.

    That thread answers as long as the process gets the processor, whatever the request does. An empty line is sent at
    the start as well: from then on, silence means that the process hangs.
    """
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_read, args=[lines], daemon=True).start()
    _send_line(b"")
    while (line := lines.get()) is not None:
        yield json.loads(line)


def _read(lines: SimpleQueue[bytes | None]) -> None:
    # Not sys.stdin, whose lock would be held while the interpreter shuts down.
    partial_line = b""
    while data := os.read(_IN, _READ_BYTES):
        *whole, partial_line = (partial_line + data).split(b"\n")
        for line in whole:
            if line:
                lines.put(line)
            else:
                _send_line(b"")
    lines.put(None)


def send_answer(value: object) -> None:
    """Send the answer to the latest request."""
    _send_line(json.dumps(value).encode())


def _send_line(line: bytes) -> None:
    unsent = memoryview(line + b"\n")
    with _writing:
        while unsent:
            unsent = unsent[os.write(_OUT, unsent) :]


def main() -> None:
    """Answer requests until the input ends; the only argument is the daemon's pid."""
    end_with_parent(int(sys.argv[1]))
    for fields in requests():
        try:
            answer = _answer(fields)
        except ShardcacheError as exn:
            answer = {"error": exn.to_json()}
        send_answer(answer)


if __name__ == "__main__":
    main()
