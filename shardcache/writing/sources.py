"""Common interface of the inputs that shards are made from, and access to their files.

An `Input` describes an input in JSON, so that it can be sent to writer processes. Each process
constructs a `Source` from it, which yields the samples. An `InputFile` records the size and the
modification time of a file, by which a later change of the file is noticed.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, Self

from shardcache.shared.exceptions import InputError
from shardcache.shared.protocol import Json
from shardcache.shared.tarindex.grouping import is_of_macos
from shardcache.shared.wording.remedies import did_you_mean
from shardcache.writing.sample_tar import Position, Sample

HUB_PREFIX = "hf:"
"""Prefix of a dataset's name on Hugging Face's hub."""

IDENTITY_CHARS = 16
"""Length of an input's `identity` if that is the beginning of a digest."""

_WILDCARDS = "*?["


class Source(Protocol):
    """Samples in a fixed order, any consecutive ones of which can be read in another process.

    A source is constructed from a JSON object, the `arguments` of an `Input`. Both methods block.
    """

    def sized_positions(self) -> Iterator[tuple[int, Position]]:
        """Yield (size_bytes, position) for each sample, in order.

        The size is the space that the sample takes in a tar. It may be an estimate, but it is the
        same in each call. Raises InputError.
        """

    def read(self, first: Position, last: Position) -> Iterator[Sample]:
        """Yield the samples from the first position to the last, both included.

        Raises InputError for a file that is malformed or has changed; SampleError for a sample that
        cannot be written.
        """


@dataclass(frozen=True, slots=True)
class Input:
    """An input whose format is known.

    Attributes:
        kind: "folder", "jsonl", "parquet" or "datasets".
        arguments: arguments from which any process can construct the `Source`.
        identity: short hash of names, sizes and modification times, which changes with the content.
        files: number of the input's files; 0 if unknown.
        skipped: number of files that are left out, since they have no key.
        classes: names of the classes, in the order of their numbers; empty without classes.
    """

    kind: str
    arguments: Json
    identity: str
    files: int
    skipped: int = 0
    classes: tuple[str, ...] = ()


class InputFile(NamedTuple):
    """A file of the input, as it was when the input was listed.

    In JSON, it is a list of the three values.

    Attributes:
        path: path of the file.
        size_bytes: size of the file.
        modified_ns: modification time of the file, in nanoseconds.
    """

    path: str
    size_bytes: int
    modified_ns: int

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the file at a path as it is now. Raises InputError unless it is a regular file."""
        try:
            status = path.stat()
        except OSError as exn:
            raise read_error(exn, path) from exn
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                "it is a pipe, socket or device, not a regular file",
                url=str(path),
                remedy="write its content to a file, or remove it from the folder",
            )
        return cls(str(path), status.st_size, status.st_mtime_ns)

    def open(self) -> BinaryIO:
        """Open the file. Raises InputError if it has changed since it was listed."""
        try:
            file = open(self.path, "rb", buffering=1024**2)  # noqa: SIM115  # the caller closes it
        except OSError as exn:
            raise read_error(exn, Path(self.path)) from exn
        status = os.fstat(file.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.size_bytes, self.modified_ns):
            file.close()
            raise InputError(
                "the file changed while shards were being written from it",
                url=self.path,
                remedy="wait until nothing writes to it; then empty the destination, and start "
                "again",
            )
        return file


def missing_error(path: Path) -> InputError:
    """Return the error for a file or folder that does not exist; it may suggest a similar name."""
    # A shell leaves a pattern as it is if no file matches.
    if any(wildcard in str(path) for wildcard in _WILDCARDS):
        return InputError(
            "no file matches",
            url=str(path),
            remedy=f"give the folder itself: {path.parent}",
        )
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return InputError("there is no such folder", url=str(path.parent), remedy="check the path")
    # The best suggestion is a name that differs only by its suffix, however different the suffix
    # is (`cutoff=0`). Otherwise, a name that is spelled alike is suggested.
    same_stem = [name for name in names if Path(name).stem == path.stem]
    if same_stem:
        hint = did_you_mean(path.name, same_stem, cutoff=0)
    else:
        hint = did_you_mean(path.name, names)
    return InputError(
        f"there is no such file or folder{hint}",
        url=str(path),
        remedy="check the path",
    )


def read_error(exn: OSError, path: Path) -> InputError:
    """Return the error for a file or folder that cannot be read because of `exn`."""
    if isinstance(exn, FileNotFoundError):
        return missing_error(path)
    return InputError(
        f"cannot read it ({exn.strerror})",
        url=str(path),
        remedy="check the path and the permissions of this user",
    )


def is_left_out(name: str) -> bool:
    """Return True for a name that inputs leave out: a hidden file or folder, or one of macOS's."""
    return name.startswith(".") or is_of_macos(os.fsencode(name))
