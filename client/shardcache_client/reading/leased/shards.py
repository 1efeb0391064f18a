"""Shards on local disk: whole shards, and shards that are still arriving.

A shard is arriving while the daemon downloads it into a file, and whole once all bytes have been
checked. The daemon then publishes the file: it renames the file to its final path, and writes an
index of the samples beside it. A whole shard is read by that index, an arriving shard from its
beginning. `LeasedShard` opens both kinds.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from shardcache.shared.exceptions import CorruptShardError
from shardcache.shared.formats.format import Walk
from shardcache.shared.protocol import Arriving
from shardcache.shared.tarindex.tables import TarIndex
from shardcache.shared.urls.url_names import format_of
from shardcache_client.samples import mapped_file, slicing
from shardcache_client.samples.column_runs import ColumnRuns
from shardcache_client.samples.column_values import (
    column_decoders,
    decoders_of,
    rows_decoder_of,
    run_decoders_of,
    with_decoders,
)
from shardcache_client.samples.row_runs import RowRuns
from shardcache_client.samples.sample_view import WHOLE, View
from shardcache_client.samples.slicing import ColumnSpans, Sample, SlicedColumn
from shardcache_client.samples.token_blocks import BlockCutter

if TYPE_CHECKING:  # at run time, this import would need numpy
    from shardcache_client.sharing.handover import Handover, Loan


class ShardPlace(NamedTuple):
    """Paths of a shard's files.

    Attributes:
        path: path of the tar.
        index_path: path of the index file beside the tar.
        inode: inode of a tar that is not published yet, and may be renamed at any time, so that
            other processes cannot rely on `path`; None for a published tar.
    """

    path: Path
    index_path: Path
    inode: int | None = None


class MappedShard:
    """One whole shard, read by its index. Its samples outlive this object.

    Args:
        place: paths of its files.
        url: name of the shard in its samples and in errors.
        in_order: True if the samples will be read in file order: the kernel then reads ahead.
        handover: passes the samples' values to other processes without a copy; None for values that
            are bytes, as far as the view does not decode them.
        view: the form in which samples are read.

    Raises TokensError if the view is of blocks of tokens, and the shard has none; ShardGoneError if
    a file does not exist, CacheDirError if a file may not be read, CorruptShardError if the index
    is damaged or belongs to another tar; UnsupportedShardError, ConfigError for columns that cannot
    be decoded.
    """

    def __init__(
        self,
        place: ShardPlace,
        url: str,
        *,
        in_order: bool = True,
        handover: Handover | None = None,
        view: View = WHOLE,
    ) -> None:
        path, index_path, inode = place
        self.path = path
        self.url = url
        self._view = view
        self._blocks: BlockCutter | None = None
        try:
            with ExitStack() as opened:  # closes what was opened if anything fails
                index = TarIndex.open(index_path, check_members=False)
                self.index = opened.enter_context(closing(index))
                # None (not a missing entry): the shard was evicted, and fetched as a plain file.
                if self.index.header.get("samples", 0) is None:
                    raise FileNotFoundError(errno.ENOENT, "the shard is not indexed", str(path))
                size_bytes = self.index.header["size_bytes"]
                mapped = mapped_file.map_file(path, size_bytes, inode, in_order=in_order)
                self.tar = opened.enter_context(closing(mapped))
                names = self.index.extensions
                # There are three ways to decode: one value at a time, or a run of successive values
                # of a column, or whole rows. A way that a column cannot use has None for it.
                self._decoders = decoders_of(self.index.header, names, view, url)
                self._decode_runs = run_decoders_of(self.index.header, self._decoders)
                self._decode_rows = rows_decoder_of(self.index.header, names, view)
                # Decoding values together does not use the places of single members. The check of
                # these places takes time, so it waits until a value is decoded by itself.
                self._are_members_checked = False
                if self._decode_rows is None and not any(self._decode_runs):
                    self._check_members()
                self._count = len(self.index)
                if view.blocks is not None:
                    self._blocks = BlockCutter(view.blocks, self.index, self.tar, url)
                    self._count = len(self._blocks)
                self._loan = self._lend(handover, inode)
                opened.pop_all()  # nothing failed: the files stay open until `close`
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=url) from exn
        except OSError as exn:
            raise mapped_file.unreadable(exn, path, url) from exn

    def __repr__(self) -> str:
        return f"MappedShard({self.url!r}, samples={len(self)}, closed={self.tar.closed})"

    def __len__(self) -> int:
        return self._count

    def _lend(self, handover: Handover | None, inode: int | None) -> Loan | None:
        """Let other processes use the mapped tar; return None without a handover.

        Args:
            handover: passes values to the other processes.
            inode: inode of a tar that is not published yet; None for a published tar.
        """
        if handover is None:
            return None
        # Another process can open the file only if it has a lasting path.
        is_findable = inode is None and not mapped_file.is_nameless(self.path)
        findable_path = self.path if is_findable else None
        return handover.lend(self.tar, findable_path, self.path.stat().st_ino, self.url)

    def close(self) -> None:
        """Unmap the shard. With a handover, the shard stays mapped until its last value is gone.

        Iterators over it raise ValueError from here on.
        """
        self.index.close()
        if self._loan is None:
            self.tar.close()

    @property
    def is_settled(self) -> bool:
        """True if all processes that samples were sent to have mapped the file.

        The answer is final only once no more samples are read from the shard.
        """
        return self._loan is None or self._loan.is_settled()

    def _check_members(self) -> None:
        """Raise CorruptShardError if the index has members outside of the shard. Checks once."""
        if not self._are_members_checked:
            self.index.check_members()
            self._are_members_checked = True

    def _columns(self) -> list[SlicedColumn | None]:
        """Return for each extension how its values are made; None for values that are not read."""
        if self._loan is None:
            columns = slicing.undecoded_columns(self.index.extensions, self.tar)
        else:
            columns = self._loan.columns(self.index)
        columns = with_decoders(columns, self._decoders, self.tar)
        return slicing.choose_columns(columns, self._view.reads, self._view.prefix)

    def cutter(self) -> Callable[..., Sample]:
        """Return a function that returns any sample by its number; see `slicing.cutter`."""
        if self._blocks is not None:
            return self._blocks
        rows = self._rows()
        if rows is not None:
            return rows.cutter()
        self._check_members()
        return slicing.cutter(self.index, self._columns(), self.url)

    def _rows(self) -> RowRuns | None:
        """Return the samples as rows, or None if whole rows cannot be decoded at once."""
        if self._decode_rows is None:
            return None
        return RowRuns(
            self.index, self._decode_rows, self.tar, self.url, self._columns, self._check_members
        )

    def column_spans(self, numbers: Sequence[int | None]) -> list[ColumnSpans] | None:
        """Return the spans of the values of samples in the file; see `slicing.column_spans`.

        Args:
            numbers: numbers of the samples; None for a sample that is missing.
        """
        self._check_members()
        return slicing.column_spans(self.index, self._columns(), numbers)

    def samples(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Yield each sample from `start` on, up to `stop`.

        A sample is `{"__key__": str, "__url__": str, extension: bytes…}`.

        Raises SampleError in place of a bad sample. The error ends the iterator, as any exception
        does; continue with `samples(n + 1)`, where n is the number of the bad sample.

        Args:
            stop: number after the last sample; None for all samples.
        """
        if stop is None or stop > len(self):
            stop = len(self)
        if self._blocks is not None:
            return map(self._blocks, range(start, stop))
        rows = self._rows()
        if rows is not None:
            return rows.in_order(start, stop)
        columns = self._columns()
        if any(self._decode_runs):
            runs = ColumnRuns(self.index, columns, self._decode_runs, self.url, self._check_members)
            return runs.in_order(start, stop)
        return slicing.cut(self.index, columns, self.url, start, stop)


More = Callable[[int], Arriving | None]
"""Waits until more than the given number of a shard's bytes have arrived; returns the new grant.

Returns None if nothing more may be read from this file. Raises the error that keeps the rest of the
shard from arriving.
"""


class _EndOfFileError(Exception):
    """Nothing more may be read from an arriving file; the rest of the shard is in another file."""


def _raise_closed(_beyond: int) -> NoReturn:
    """Stand in for `more` once a shard is closed."""
    raise ValueError("the shard is closed")


class ArrivingShard:
    """The samples of a shard as far as it has arrived.

    Used like a `MappedShard`, with the same sample numbers.

    The file has its final size from the start, so it is mapped once. Bytes that have not arrived
    would read as zeros, and are never accessed. Renaming the file on publication does not affect
    the map.

    A sample is yielded once the header after its last member has arrived. The last sample is never
    yielded here, but read from the whole shard: only the end of the tar shows that the sample is
    complete, and the daemon checks that end.

    Raises ShardGoneError if the file was published or its download given up, CacheDirError if the
    file may not be read, CorruptShardError if the file's size differs from the shard's.
    """

    def __init__(
        self,
        grant: Arriving,
        more: More,
        last: int | None = None,
        view: View = WHOLE,
    ) -> None:
        """Map an arriving shard.

        Args:
            grant: names the file, and the number of bytes that have arrived.
            more: waits for more bytes; see `More`.
            last: number of the shard's last sample according to the manifest, which is not yielded
                here; None if unknown.
            view: the form in which samples are read.
        """
        self.url = grant["url"]
        self._view = view
        self._more = more
        self._last = last
        self._ready_bytes = grant["ready_bytes"]
        self._size_bytes = grant["size_bytes"]
        path = Path(grant["path"])
        try:
            self._map = mapped_file.map_file(path, self._size_bytes, grant["inode"])
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=self.url) from exn
        except OSError as exn:
            raise mapped_file.unreadable(exn, path, self.url) from exn
        self._walk: Walk | None = None
        self._columns: list[SlicedColumn | None] = []

    def __repr__(self) -> str:
        ready = f"{self._ready_bytes} of {self._size_bytes} bytes"
        return (
            f"ArrivingShard({self.url!r}, {ready}, samples={self._arrived_count}, "
            f"closed={self._map.closed})"
        )

    def close(self) -> None:
        """Unmap the file. Iterators over the shard raise ValueError from here on."""
        self._map.close()
        # The walk refers to this object, and this object to the walk. As `more` refers to the
        # reader's session, this cycle would keep the session alive until the garbage collector
        # runs.
        self._walk = None
        self._more = _raise_closed

    def samples(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Yield samples as `MappedShard` does, each as soon as it has arrived.

        Ends at the first sample that has to be read from another file.

        Raises NotATarError, TruncatedShardError, CorruptShardError for bytes that are not a tar;
        TornSampleError if the tar has members of one sample in two places; any error that `more`
        raises. Only the second place shows that a sample is torn, so the members at the first may
        have been yielded as a sample before.
        """
        numbers = count(start) if stop is None else range(start, stop)
        for number in numbers:
            if not self._has_arrived(number):
                return
            assert self._walk is not None
            tables = self._walk.samples
            self._add_columns()
            yield from slicing.cut(tables, self._columns, self.url, number, number + 1)

    def _add_columns(self) -> None:
        """Add the columns of the extensions found in the tar since the previous call."""
        assert self._walk is not None
        tables = self._walk.samples
        known_count = len(self._columns)
        new_extensions = tables.extensions[known_count:]
        if not new_extensions:
            return
        columns = slicing.undecoded_columns(new_extensions, self._map)
        encodings = tables.encodings[known_count:]
        if encodings:
            format_ = format_of(self.url)
            decoders = column_decoders(format_, new_extensions, encodings, self._view, self.url)
            columns = with_decoders(columns, decoders, self._map)
        self._columns += slicing.choose_columns(columns, self._view.reads, self._view.prefix)

    @property
    def _arrived_count(self) -> int:
        """Number of samples that have arrived."""
        if self._walk is None:
            return 0
        return len(self._walk.samples.member_ends)  # one entry for each sample

    def _has_arrived(self, number: int) -> bool:
        """Wait until a sample has arrived; return False if it has to be read from another file."""
        try:
            # To wait for more bytes than the shard has is to wait for its end: such a wait ends
            # with _EndOfFileError, as soon as the whole shard can be read from its own file.
            if number == self._last:
                self._wait_beyond(self._size_bytes)
            if self._walk is None:
                self._walk = format_of(self.url).walk(self._read, self._size_bytes, self.url)
            while self._arrived_count <= number:
                if not self._walk.advance():
                    self._wait_beyond(self._size_bytes)
        except _EndOfFileError:
            return False
        return True

    def _read(self, at: int, min_bytes: int, max_bytes: int) -> bytes:
        """Return bytes for the walk over the tar, waiting until they have arrived.

        Args:
            at: offset of the first byte.
            min_bytes: number of bytes to wait for, or fewer at the end of the shard.
            max_bytes: maximum number of bytes to return, as far as they have arrived.
        """
        needed_bytes = min(at + min_bytes, self._size_bytes)
        while self._ready_bytes < needed_bytes:
            self._wait_beyond(needed_bytes - 1)
        return self._map[at : min(at + max_bytes, self._ready_bytes)]

    def _wait_beyond(self, beyond: int) -> None:
        """Wait until more than `beyond` bytes have arrived.

        Raises _EndOfFileError if the file must not be read any further; see `More`.
        """
        grant = self._more(beyond)
        if grant is None:
            raise _EndOfFileError
        self._ready_bytes = grant["ready_bytes"]
