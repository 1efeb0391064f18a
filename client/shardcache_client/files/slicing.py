"""Files of cached shards: mapped into memory, and sliced into samples by their index, without parsing the tar."""

import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from shardcache.errors import CacheDirError, CorruptShardError, SampleError
from shardcache.tarindex import Tables, fault_of

Sample = dict[str, Any]

_OWN_FILES = Path("/proc/self/fd")


class Slices(Protocol):
    """The bytes of a tar, sliced into values of samples: slices of a map are `bytes`, those of a `Buffer` are views."""

    def __getitem__(self, run: slice, /) -> Any: ...


Column = tuple[str, Slices]
"""An extension, and the tar's bytes from which its values are sliced."""

Reads = Callable[[str], bool]
"""Returns True if samples get the members with an extension."""


class ShardGoneError(CacheDirError):
    """A file named by the daemon does not exist: it was evicted again, or this process cannot see the cache."""

    code = "shard_gone"


def map_file(path: Path, size_bytes: int, inode: int | None = None, *, in_order: bool = True) -> mmap.mmap:
    """Map a file for reading. Raises CorruptShardError for another size, OSError if unreadable or of another inode."""
    # No file in the cache folder is a link. The /proc/self/fd path of a nameless file is one.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if is_nameless(path) else os.O_NOFOLLOW))
    try:
        stat = os.fstat(fd)
        if inode not in (None, stat.st_ino):
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", str(path))
        if stat.st_size != size_bytes:
            raise CorruptShardError(f"{path} has {stat.st_size} bytes instead of {size_bytes}")
        mapped = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    if in_order:
        mapped.madvise(mmap.MADV_SEQUENTIAL)  # the file may not be in the page cache
    return mapped


def is_nameless(path: Path) -> bool:
    """Return True for an open file of this process that no other process can find."""
    return path.parent == _OWN_FILES


def unreadable(exn: OSError, path: Path, url: str) -> CacheDirError:
    """Return the error for a cached file that cannot be opened or mapped."""
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


def chosen(columns: Iterable[Column], reads: Reads | None) -> list[Column | None]:
    """Return the columns, with None for those left out."""
    return [column if reads is None or reads(column[0]) else None for column in columns]


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


def cutter(tables: Tables, columns: Sequence[Column | None], url: str) -> Callable[[int], Sample]:
    """Return a function that returns any sample by its number, as from `cut`. It raises SampleError for a bad one."""
    # Variables of a closure cost less than attributes, and a shuffled reader comes through here for each sample.
    starts, ends, extension_ids = tables.starts, tables.ends, tables.extension_ids
    member_ends, key_ends, keys, faults = tables.member_ends, tables.key_ends, tables.keys, tables.faults

    def cut_one(number: int) -> Sample:
        if number in faults:
            raise _sample_error(tables, number, url)
        member, key = (member_ends[number - 1], key_ends[number - 1]) if number else (0, 0)
        name = str(keys[key : key_ends[number]], "utf-8", "surrogateescape")
        sample: Sample = {"__key__": name, "__url__": url}
        for each in range(member, member_ends[number]):
            column = columns[extension_ids[each]]
            if column is not None:
                sample[column[0]] = column[1][starts[each] : ends[each]]
        return sample

    return cut_one


def _sample_error(tables: Tables, number: int, url: str) -> SampleError:
    return SampleError(
        fault_of(tables, number) or "",
        url=url,
        remedy="rewrite the shard with the members of each sample as plain files of different extensions; "
        "until then an on_error handler can skip the sample",
    )
