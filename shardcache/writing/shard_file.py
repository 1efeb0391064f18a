"""One shard as a local file, while it is being written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shardcache.errors import DiskError
from shardcache.tarindex.tokens import TokenMember, tokens_in
from shardcache.writing.plan.samples import Sample, Succession
from shardcache.writing.plan.tar import END, add

_BUFFER_BYTES = 1024**2


class ShardFile:
    """A tar that grows by samples. Raises DiskError if the file cannot be written.

    Attributes:
        path: where it lies; an older file there is replaced.
        samples: number of samples so far.
        tokens: number of tokens so far, if they are counted; else None.

    Args:
        tokens: the member whose tokens to count.
    """

    def __init__(self, path: Path, tokens: TokenMember | None = None) -> None:
        self.path = path
        self.samples = 0
        self.tokens = None if tokens is None else 0
        self._member = tokens
        self._succession = Succession()
        try:
            self._file: BinaryIO = path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as exn:
            raise unwritable(exn, path) from exn

    @property
    def size_bytes(self) -> int:
        """Size that the tar would have if it ended here."""
        return self._file.tell() + len(END)

    def add(self, sample: Sample) -> None:
        """Append a sample. Raises SampleError for one with the key of the one before, TokensError for a bad array."""
        self._succession.check(sample)
        if self._member is not None and self.tokens is not None:
            self.tokens += sum(
                tokens_in(data, self._member, sample.key)
                for extension, data in sample.members
                if extension.lower() == self._member.extension.lower()
            )
        try:
            add(self._file.write, sample)
        except OSError as exn:
            raise unwritable(exn, self.path) from exn
        self.samples += sample.count

    def finish(self) -> None:
        """Write the end of the archive, and close the file."""
        try:
            self._file.write(END)
            self._file.close()
        except OSError as exn:
            raise unwritable(exn, self.path) from exn

    def discard(self) -> None:
        """Remove the file, finished or not."""
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


def unwritable(exn: OSError, path: Path) -> DiskError:
    """Return the error for a local file that cannot be written."""
    return DiskError(
        f"cannot write the file ({exn.strerror})",
        url=str(path),
        remedy="free space there; unfinished shards for an object store lie in $TMPDIR",
    )
