"""Program that indexes shards, in a process of its own.

In the daemon, indexing would hold the interpreter lock for too long. `Indexers` starts several of
these processes and sends them requests. Each request and each answer is a line of JSON: the fields
of one of the dataclasses here. A process exits at the end of its input, which is also closed when
the daemon is killed. The program imports little, as each process takes memory for its imports.

The index of a shard lists its samples and their positions. It is written to the shard's sidecar,
after a header with facts about the shard.
"""

import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardcache.shared.exceptions import CacheError, ShardcacheError, UnsupportedShardError
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.formats.memory_limit import MAX_MEMORY_BYTES, limit_memory
from shardcache.shared.tarindex import tables
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.shared.tarindex.token_runs import find_tokens
from shardcache.shared.urls.url_names import format_of
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.indexing.helper_program import end_with_parent, requests, send_answer
from shardcache.transport.between.checksums import crc32c


@dataclass(frozen=True, slots=True)
class IndexRequest:
    """A request to index a shard.

    Attributes:
        shard_path: path of the shard.
        sidecar_path: path of the sidecar to write.
        header: the sidecar's header, without the fields that indexing adds.
        url: the shard's url, which determines its format and is named in errors.
        require_end: True to reject a tar without an end-of-archive block.
        allowed_bytes: maximum size of the sidecar.
        ignore_trailing_data: True to accept a tar with data after the end-of-archive block.
        require_adjacent: True to reject a tar in which the members of one sample are not adjacent.
        companion: what `Format.companion_of` took from another file that the format needs; None for
            a format that needs no other file.
    """

    shard_path: str
    sidecar_path: str
    header: dict[str, Any]
    url: str
    require_end: bool
    allowed_bytes: int
    ignore_trailing_data: bool = False
    require_adjacent: bool = True
    companion: str | None = None


@dataclass(frozen=True, slots=True)
class IndexOutcome:
    """The result of indexing.

    Attributes:
        samples: number of samples in the shard.
        sidecar_bytes: size of the sidecar, written or not.
        was_written: False if the sidecar was not written, as it would exceed the allowed size.
    """

    samples: int
    sidecar_bytes: int
    was_written: bool


@dataclass(frozen=True, slots=True)
class TokensRequest:
    """A request to count the tokens in one member of each sample of an indexed shard.

    Attributes:
        shard_path: path of the shard.
        sidecar_path: path of its sidecar.
        url: the shard's url, for error messages.
        member: the member with the tokens, in the notation of `TokenMember.parse`.
    """

    shard_path: str
    sidecar_path: str
    url: str
    member: str


def index_shard(request: IndexRequest) -> IndexOutcome:
    """Read a shard to its end and write its sidecar. Blocks. Raises ShardError, DiskError."""
    shard_path = Path(request.shard_path)
    sidecar_path = Path(request.sidecar_path)
    options = IndexOptions(
        require_end=request.require_end,
        ignore_trailing_data=request.ignore_trailing_data,
        require_adjacent=request.require_adjacent,
        companion=request.companion,
        crc32c=crc32c,  # formats may not import `transport` themselves
    )
    format_ = format_of(request.url)
    with disk_errors(shard_path):
        samples = format_.index(shard_path, request.url, options)
    header = request.header | {
        "samples": len(samples),
        "content": format_.name,
        "encodings": samples.encodings,  # of each column
    }
    with disk_errors(sidecar_path):
        # This is the sidecar's size even if it exceeds the maximum and is not written.
        sidecar_bytes = tables.write(sidecar_path, header, samples, request.allowed_bytes)
    was_written = sidecar_bytes <= request.allowed_bytes
    return IndexOutcome(len(samples), sidecar_bytes, was_written)


def count_tokens(request: TokensRequest) -> int:
    """Return the number of tokens in one member of each sample of a shard. Blocks.

    Raises TokensError, CorruptShardError, DiskError.
    """
    member = TokenMember.parse(request.member)
    shard_path = Path(request.shard_path)
    sidecar_path = Path(request.sidecar_path)
    with disk_errors(sidecar_path):
        index = tables.TarIndex.open(sidecar_path)
    try:
        with disk_errors(shard_path), open(shard_path, "rb", buffering=0) as shard:
            return find_tokens(index, _FileBytes(shard.fileno()), member, request.url).tokens
    finally:
        index.close()


@dataclass(frozen=True, slots=True)
class _FileBytes:
    """The bytes of an open file, as a sequence that is read from the file when it is sliced.

    A bad sector raises an error here; in a mapped file, it would kill the process by a signal.
    """

    fd: int

    def __getitem__(self, byte_range: slice) -> bytes:
        return os.pread(self.fd, byte_range.stop - byte_range.start, byte_range.start)


def main() -> None:
    """Answer requests until the input ends; the program's only argument is the daemon's pid."""
    end_with_parent(int(sys.argv[1]))
    limit_memory()
    for fields in requests():
        try:
            answer = _answer(fields)
        except ShardcacheError as exn:
            answer = {"error": exn.to_json()}
        except MemoryError:
            answer = {"error": _too_large(fields).to_json()}
        except Exception as exn:
            # The fault lies with this program. If the error ended the process, the daemon would
            # report that the process was killed, and suggest a lack of memory.
            logging.exception("unexpected error in %s %s", _task(fields), fields["url"])
            answer = {"error": _unexpected(exn, fields).to_json()}
        send_answer(answer)


def _answer(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, which is an `IndexRequest` or a `TokensRequest`."""
    if _is_tokens_request(fields):
        return {"tokens": count_tokens(TokensRequest(**fields))}
    return asdict(index_shard(IndexRequest(**fields)))


def _is_tokens_request(fields: dict[str, Any]) -> bool:
    return "member" in fields  # an `IndexRequest` has no such field


def _task(fields: dict[str, Any]) -> str:
    """Return what a request asks for, for messages."""
    if _is_tokens_request(fields):
        return "counting the tokens of the shard"
    return "indexing the shard"


def _too_large(fields: dict[str, Any]) -> UnsupportedShardError:
    return UnsupportedShardError(
        f"{_task(fields)} takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory",
        url=fields["url"],
        remedy="write smaller shards",
    )


def _unexpected(exn: Exception, fields: dict[str, Any]) -> CacheError:
    return CacheError(
        f"{_task(fields)} failed with an unexpected error ({type(exn).__name__}: {exn})",
        url=fields["url"],
        remedy="report it, with the traceback that the daemon wrote to its standard error",
    )


if __name__ == "__main__":
    main()
