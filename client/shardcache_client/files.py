"""Files of cached shards: mapped, and sliced by their index, not the tar, into samples or blocks of tokens."""

import errno
import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from operator import add
from pathlib import Path
from typing import Any, Literal, Protocol

from shardcache.errors import CacheDirError, ConfigError, CorruptShardError, SampleError, TokensError
from shardcache.tarindex.contents import DTYPES, TokenMember, find_tokens
from shardcache.tarindex.tables import Tables, TarBytes, fault_of, key_of
from shardcache_client.arguments import TEXT, converted, flag, whole

Sample = dict[str, Any]

_OWN_FILES = Path("/proc/self/fd")
# Errors that say that a file, or the disk under it, is damaged, and nothing about this process.
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ELOOP, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EREMOTEIO)


class Slices(Protocol):
    """The bytes of a tar, sliced into values of samples: slices of a map are `bytes`, those of a `Buffer` are views."""

    def __getitem__(self, run: slice, /) -> Any: ...


Column = tuple[str, Slices]
"""An extension, and the tar's bytes from which its values are sliced."""

Run = tuple[str, Slices, Sequence[int], Sequence[int]]
"""A column, and where its value begins and ends in each sample, by number."""

Adder = Callable[[int, Sample], object]
"""Adds members to a sample, also given by number."""

Reads = Callable[[str], bool]
"""Returns True if samples get the members with an extension."""


class ShardGoneError(CacheDirError, code="shard_gone"):
    """A file named by the daemon does not exist: it was evicted again, or this process cannot see the cache."""


def open_file(path: Path, size_bytes: int, inode: int | None = None) -> int:
    """Open a file for reading; return its descriptor. Raises as `map_file` does."""
    # No file in the cache folder is a link. The /proc/self/fd path of a nameless file is one.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_nameless(path) else os.O_NOFOLLOW))
    stat = os.fstat(fd)
    if inode in (None, stat.st_ino) and stat.st_size == size_bytes:
        return fd
    os.close(fd)
    if inode not in (None, stat.st_ino):
        raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(path))
    raise CorruptShardError(f"{path} has {stat.st_size} bytes instead of {size_bytes}")


def map_file(path: Path, size_bytes: int, inode: int | None = None, *, in_order: bool = True) -> mmap.mmap:
    """Map a file for reading. Raises CorruptShardError for another size, OSError if unreadable or of another inode."""
    fd = open_file(path, size_bytes, inode)
    try:
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if in_order:
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # the file may not be in the page cache
    return mapped


def damage_of(exn: Exception) -> str:
    """Return what an error of reading a published file says is wrong with it; empty if it says nothing of the file."""
    return exn.message if isinstance(exn, CorruptShardError | TokensError) else ""


def is_nameless(path: Path) -> bool:
    """Return True for an open file of this process that no other process can find."""
    return path.parent == _OWN_FILES


def unreadable(exn: OSError, path: Path, url: str) -> CacheDirError | CorruptShardError:
    """Return the error for a cached file that cannot be opened or mapped."""
    if exn.errno in _DAMAGE:
        return CorruptShardError(f"the cached file {exn.filename or path} cannot be read ({exn.strerror})", url=url)
    kind = ShardGoneError if isinstance(exn, FileNotFoundError) else CacheDirError
    message = f"this process cannot read {exn.filename or path} ({exn.strerror})"
    if exn.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        remedy = "raise the limits on open files (ulimit -n) and mappings (vm.max_map_count), or hold fewer shards"
        return kind(message, url=url, remedy=remedy)
    return kind(
        message,
        url=url,
        remedy="in a container, mount the cache folder at the same path as for the daemon; "
        "otherwise, add the user to the folder's group",
    )


def chosen(columns: Iterable[Column], reads: Reads | None, prefix: str = "") -> list[Column | None]:
    """Return the columns, with a prefix to their extensions, and None for those left out."""
    named = ((prefix + name, tar) for name, tar in columns)
    return [column if reads is None or reads(column[0]) else None for column in named]


def as_bytes(extensions: Iterable[str], tar: Slices) -> list[Column]:
    """Return columns that all slice `tar`."""
    return [(extension, tar) for extension in extensions]


def cut(tables: Tables, columns: Sequence[Column | None], url: str, start: int, stop: int) -> Iterator[Sample]:
    """Yield the samples from number `start` to `stop`: `{"__key__": str, "__url__": str, extension: bytes…}`.

    Columns are in the order of the tables' extensions, None for members to leave out. Raises SampleError in place of a
    bad sample, which ends the iterator.
    """
    keys = tables.keys
    member_end = tables.member_ends[start - 1] if start else 0
    key_end = tables.key_ends[start - 1] if start else 0
    last = tables.member_ends[stop - 1] if stop else 0
    members = zip(
        map(columns.__getitem__, tables.extension_ids[member_end:last]),
        tables.starts[member_end:last],
        tables.ends[member_end:last],
        strict=True,
    )
    ends = zip(tables.member_ends[start:stop], tables.key_ends[start:stop], strict=True)
    for number, (next_member_end, next_key_end) in enumerate(ends, start):
        if number in tables.faults:
            raise _sample_error(tables, number, url)
        sample: Sample = {"__key__": str(keys[key_end:next_key_end], "utf-8", "surrogateescape"), "__url__": url}
        for column, first, end in islice(members, next_member_end - member_end):
            if column is not None:
                sample[column[0]] = column[1][first:end]
        yield sample
        member_end, key_end = next_member_end, next_key_end


def cutter(tables: Tables, columns: Sequence[Column | None], url: str) -> Callable[..., Sample]:
    """Return a function that returns any sample by its number, or adds its members to another; see `cut` for errors."""
    # Variables of a closure cost less than attributes, and a shuffled reader comes through here for each sample.
    starts, ends, extension_ids = tables.starts, tables.ends, tables.extension_ids
    member_ends, key_ends, keys, faults = tables.member_ends, tables.key_ends, tables.keys, tables.faults

    def cut_one(number: int, sample: Sample | None = None) -> Sample:
        if number in faults:
            raise _sample_error(tables, number, url)
        member, key = (member_ends[number - 1], key_ends[number - 1]) if number else (0, 0)
        if sample is None:
            sample = {"__key__": str(keys[key : key_ends[number]], "utf-8", "surrogateescape"), "__url__": url}
        for each in range(member, member_ends[number]):
            column = columns[extension_ids[each]]
            if column is not None:
                sample[column[0]] = column[1][starts[each] : ends[each]]
        return sample

    return cut_one


def runs_of(tables: Tables, columns: Sequence[Column | None], places: Sequence[int | None]) -> list[Run] | None:
    """Return the runs of the samples at `places`, in this order; None unless all samples have the same members."""
    width, count = len(columns), len(tables)
    alike = tables.extension_ids.tobytes() == array("I", range(width)).tobytes() * count
    if tables.faults or not alike or (places != range(count) and None in places):
        return None
    runs = list[Run]()
    for nth, column in enumerate(columns):
        if column is not None:
            bounds: list[Any] = [table[nth::width] for table in (tables.starts, tables.ends)]
            if places != range(count):
                bounds = [array("Q", map(bound.__getitem__, places)) for bound in bounds]
            runs.append((*column, bounds[0], bounds[1]))
    return runs


def joined(keys: Sequence[bytes], url: str, runs: Sequence[Run], adders: Sequence[Adder]) -> Callable[[int], Sample]:
    """Return a function that returns any sample by its number, with the values of runs and what adders add."""

    def cut_one(number: int) -> Sample:
        sample: Sample = {"__key__": keys[number].decode("utf-8", "surrogateescape"), "__url__": url}
        for extension, tar, starts, ends in runs:
            sample[extension] = tar[starts[number] : ends[number]]
        for adder in adders:
            adder(number, sample)
        return sample

    return cut_one


def _sample_error(tables: Tables, number: int, url: str) -> SampleError:
    return SampleError(
        fault_of(tables, number) or "",
        url=url,
        remedy="rewrite the shard with the members of each sample as plain files of different extensions",
    )


# Blocks of tokens, cut from the documents of a shard

_RULES = {
    "length": whole(1),
    "member": TEXT,
    "dtype": TEXT.or_none(),
    "overlap": whole(0),
    "end": whole(0).or_none(),
    "documents": flag(),
}


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Samples that are blocks of `length` tokens, in place of documents, for training language models.

    The documents of each shard are put end to end in their order, and cut into blocks across their borders; blocks are
    then what is dealt, shuffled, counted and resumed. Fewer than `length` tokens at the end of each shard are left out.
    A sample has `__key__` (that of the document in which the block begins, ":", and the number of its first token in
    it), `__url__`, and `tokens`, a numpy array of its own.

    Attributes:
        length: number of tokens in a block.
        member: extension of the member with the tokens of a document: an array of integers with one dimension.
        dtype: type of the tokens, such as "uint16", if members are plain little-endian arrays; None for `.npy` files.
        overlap: number of tokens that a block repeats from the end of the one before; 1 for blocks of inputs whose
            targets are the next tokens, with a length of one more than the context.
        end: token to add after each document; None for documents that end with one, or need none.
        documents: True for samples with `documents`, too: the number of each token's document, as int32, from 0 in each
            block, for attention within documents.

    Raises ConfigError if an argument is invalid.
    """

    length: int
    member: str = "npy"
    dtype: str | None = None
    overlap: int = 0
    end: int | None = None
    documents: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        for name, rule in _RULES.items():
            object.__setattr__(self, name, converted(name, getattr(self, name), rule))
        if self.overlap >= self.length:
            remedy = "give an overlap below the length"
            raise ConfigError(f"blocks of {self.length} tokens that overlap by {self.overlap}", remedy=remedy)
        member = TokenMember(self.member, self.dtype)
        if member.dtype is not None and not fits(self.end, member.dtype):
            raise ConfigError(
                f"the end token {self.end} is too large for {member.dtype}", remedy="choose a smaller one"
            )
        try:
            import numpy  # noqa: F401
        except ImportError as exn:
            raise ConfigError("blocks of tokens need numpy", remedy="pip install numpy") from exn

    def count(self, tokens: int, documents: int) -> int:
        """Return the number of blocks in a shard, given the tokens and documents in it."""
        ends = 0 if self.end is None else documents
        return max(0, (tokens + ends - self.overlap) // (self.length - self.overlap))


def fits(end: int | None, dtype: str) -> bool:
    """Return True if a type of tokens can have the end token, or there is none."""
    bits = 8 * DTYPES[dtype] - dtype.startswith("i")
    return end is None or end < 1 << bits


@dataclass(frozen=True, slots=True)
class View:
    """Samples with the members that `reads` chooses, all without it; or blocks of their tokens."""

    reads: Reads | None = None
    blocks: TokenBlocks | None = None
    prefix: str = ""  # of the extensions of members
    unmatched: Literal["error", "skip", "fill"] = "error"  # what becomes of samples that none of this view fits


WHOLE = View()


class BlockCutter:
    """The blocks of one shard, by number. Refers to the index and the tar, which must stay open.

    Raises TokensError for a shard that has no tokens of this kind, ConfigError if its type cannot have the end token.
    """

    def __init__(self, blocks: TokenBlocks, index: Tables, tar: TarBytes, url: str) -> None:
        import numpy as np

        runs = find_tokens(index, tar, TokenMember(blocks.member, blocks.dtype), url)
        if not fits(blocks.end, runs.dtype):
            raise ConfigError(f"the end token {blocks.end} is too large for {runs.dtype}", url=url)
        self._blocks = blocks
        self._index = index
        self._tar = tar
        self._url = url
        self._starts = runs.starts
        self._size_bytes = DTYPES[runs.dtype]  # of a token
        self._dtype = np.dtype(runs.dtype).newbyteorder("<")
        # The tar has no end tokens: a place is kept for one after each document.
        self._end = b"" if blocks.end is None else blocks.end.to_bytes(self._size_bytes, "little")
        self._ends = array("Q", map(add, runs.ends, count(1))) if self._end else runs.ends
        self._count = blocks.count(runs.tokens, len(runs.ends))

    def __len__(self) -> int:
        return self._count

    def __call__(self, number: int) -> Sample:
        """Return a block by its number."""
        import numpy as np

        length, ends, size_bytes = self._blocks.length, self._ends, self._size_bytes
        first = at = number * (length - self._blocks.overlap)
        stop = first + length
        document = bisect_right(ends, first)
        begun = ends[document - 1] if document else 0
        sample: Sample = {"__key__": f"{key_of(self._index, document)}:{first - begun}", "__url__": self._url}
        runs, borders = [], []
        while True:
            offset, document_end = self._starts[document] - begun * size_bytes, ends[document]
            own_end = document_end - 1 if self._end else document_end
            if at < own_end:
                runs.append(self._tar[offset + at * size_bytes : offset + min(own_end, stop) * size_bytes])
            if own_end < document_end <= stop:
                runs.append(self._end)
            if document_end >= stop:
                break
            borders.append(document_end - first)
            at = begun = document_end
            document += 1
        sample["tokens"] = np.frombuffer(bytearray().join(runs), self._dtype)
        if self._blocks.documents:
            begins = np.zeros(length, np.int32)
            begins[borders] = 1
            sample["documents"] = np.cumsum(begins, dtype=np.int32)
        return sample
