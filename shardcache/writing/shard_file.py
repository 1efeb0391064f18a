"""One shard while it is being written, as a local tar.

`ShardWriter` and the processes of `shardcache write` add samples to a `ShardFile`, finish it, and
let a `Destination` store it. The table of samples lists each sample with its place in its shard;
each `ShardFile` writes its own part of the table, the rows of its samples.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shardcache.config.amounts import MIB
from shardcache.shared import exceptions
from shardcache.shared.tarindex.contents import rows_of
from shardcache.shared.tarindex.grouping import Adjacency, Grouping
from shardcache.shared.tarindex.members import padded
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.shared.tarindex.spans import blocks_of
from shardcache.shared.tarindex.token_runs import tokens_in
from shardcache.writing.sample_tar import END, Sample, member_bytes, shown, table_part, utf8


class ShardFile:
    """A local tar to which samples are appended; their members and tokens are counted.

    Attributes:
        path: path of the tar.
        samples: number of samples so far.
        members: number of members so far, by lower-case extension.
        tokens: number of tokens so far; None if they are not counted.
    """

    def __init__(self, path: Path, token_member: TokenMember | None = None) -> None:
        """Begin a tar, which replaces an older file. Raises DiskError if it cannot be written.

        Args:
            path: path of the tar.
            token_member: the member whose tokens are counted; None to count no tokens.
        """
        self.path = path
        self.samples = 0
        self.members = Counter[str]()
        self.tokens = None if token_member is None else 0
        self._token_member = token_member
        self._last_key: str | None = None
        self._grouping = Grouping()
        with disk_errors(path):
            self._file: BinaryIO = path.open("wb", buffering=MIB)

    @property
    def size_bytes(self) -> int:
        """Size that the tar would have if it ended here."""
        return self._file.tell() + len(END)

    def add(self, sample: Sample) -> None:
        """Append a sample.

        Raises SampleError if the previous sample has the same key, TokensError if the tokens are
        not a valid array.
        """
        if sample.key == self._last_key:
            raise exceptions.SampleError(
                f"two consecutive samples have the key {shown(sample.key)}; readers "
                "would take them for one",
                remedy="give each sample its own key",
            )
        # This may raise, so it comes before anything is recorded: the caller may then correct the
        # sample and add it again.
        self._count_tokens(sample)
        self._last_key = sample.key
        member_end = self._file.tell()  # offset of the end of the member before
        with disk_errors(self.path):
            self._file.writelines(sample.tar())
        for extension, data in sample.members:
            self.members[extension.lower()] += sample.count
            name = utf8(f"{sample.key}.{extension}")
            member_end += member_bytes(len(name), len(data))
            start = member_end - padded(len(data))  # the content follows the member's headers
            no_fault = None
            self._grouping.add([(name, start, start + len(data), no_fault)])
        self.samples += sample.count

    def finish(self) -> None:
        """Write the end of the archive, and close the file.

        Raises SampleError if two samples have the same key and different members.
        """
        # Readers would take the two for one sample whose members are not adjacent: a torn sample.
        torn_member = Adjacency(self._grouping.finish()).find_torn()
        if torn_member is not None:
            raise exceptions.SampleError(
                f"two samples with different members have the key {shown(torn_member.key)}; "
                "readers would reject the shard",
                remedy="give each sample its own key, or write all of its members at once",
            )
        with disk_errors(self.path):
            self._file.write(END)
            self._file.close()

    def write_rows(self, path: Path, number: int, version: str | None) -> None:
        """Write this shard's part of the sample table to a file.

        Args:
            path: path of the file.
            number: number of the shard in the index.
            version: version of the shard for the table; None for a local shard.
        """
        samples = self._grouping.finish()
        # The tar was just written, so `blocks_of` need not read it to verify the samples' places.
        rows = rows_of(samples, blocks=blocks_of(samples, tar=None))
        with disk_errors(path), path.open("wb") as file:
            file.writelines(table_part(number, version, rows))

    def discard(self) -> None:
        """Close and remove the tar, finished or not."""
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _count_tokens(self, sample: Sample) -> None:
        """Add the tokens of a sample to the count, if tokens are counted. Raises TokensError."""
        if self._token_member is None or self.tokens is None:
            return
        token_extension = self._token_member.extension.lower()
        for extension, data in sample.members:
            if extension.lower() == token_extension:
                self.tokens += tokens_in(data, self._token_member, sample.key)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn OSError from the block, which writes the local file at `path`, into DiskError."""
    try:
        yield
    except OSError as exn:
        raise exceptions.DiskError(
            f"cannot write the file ({exn.strerror})",
            url=str(path),
            remedy="free space there; unfinished shards for an object store lie in $TMPDIR",
        ) from exn
