"""Ranges of a dataset's samples in their tars, from the tables of samples next to its index files.

A sample's range is the part of its tar that has the sample's bytes; `tarindex` calls it a span.
With its range, the sample is fetched alone. A table of samples is itself a shard, which lists the
keys of other shards' samples and the bytes that each member takes. Each of its rows describes some
successive samples of one shard. `shardcache index --samples` writes a table next to each index
file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.shared.exceptions import (
    AccessDeniedError,
    ConfigError,
    NotAllowedError,
    NotFoundError,
)
from shardcache.shared.tarindex.spans import RowSpans
from shardcache.shared.urls.url_names import compression_of
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.single.table_rows import (
    INVALID_ROW,
    NO_TABLES_REMEDY,
    TABLES_REMEDY,
    Row,
    TableRows,
    invalid_row,
)
from shardcache_client.stages.pipeline import Pipeline

# Errors of a missing table. S3 denies access to a missing object, instead of reporting it missing,
# if the user may not list the bucket.
_MISSING_TABLE_ERRORS = (NotFoundError, AccessDeniedError, NotAllowedError)


@dataclass(frozen=True, slots=True)
class SampleRange:
    """The range of bytes of a tar that holds a sample, or the sample's members that are read.

    Attributes:
        shard: number of the shard in the manifest.
        start: offset of the first byte in the tar.
        stop: offset after the last byte.
        key_hash: hash of the sample's key, to recognise a range that holds another sample; see
            `tarindex.spans.key_hash`.
        version: the tar's version when the table was written; None if the table does not say.
        gaps: start and stop of each gap in the range, where large members lie that are not read.
    """

    shard: int
    start: int
    stop: int
    key_hash: int
    version: str | None
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Start and stop of each piece of the range: what lies before, between and after gaps."""
        starts = [self.start, *(gap_stop for _, gap_stop in self.gaps)]
        stops = [*(gap_start for gap_start, _ in self.gaps), self.stop]
        return list(zip(starts, stops, strict=True))

    @property
    def size_bytes(self) -> int:
        """Number of bytes in all pieces."""
        return sum(stop - start for start, stop in self.pieces)


class SampleRanges:
    """Ranges of samples by shard and number, as far as tables list them. Not thread-safe.

    The tables stay cached, and mapped, until `close`. A row of a table is parsed when one of the
    row's samples is first asked for. From then on, each sample of the row takes 12 bytes of memory.
    A process that was forked opens the tables again.

    Args:
        manifest: the shards.
        tables: urls of the tables next to the manifest's index files; empty if no index files list
            the shards, so that there cannot be any tables.
        sessions: opens the session that reads the tables.
        pipeline: chooses the members that are read.
    """

    def __init__(
        self,
        manifest: Manifest,
        tables: Sequence[str],
        sessions: ReaderSessions,
        pipeline: Pipeline,
    ) -> None:
        self.manifest = manifest
        self._tables = tables
        self._sessions = sessions
        self._pipeline = pipeline
        self._rows: TableRows | None = None
        # Rows that the parent process has opened. The reference is kept so that their finalizers do
        # not run in this process.
        self._rows_of_parent: TableRows | None = None
        self._may_have_tables = bool(tables)  # False once the tables were found missing
        # By number of the row: the spans of its samples, and the version of their tar.
        self._spans: dict[int, tuple[RowSpans, str | None]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.manifest, self._tables, self._sessions, self._pipeline)

    def close(self) -> None:
        """Release the tables; they are opened again when they are needed."""
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def forget(self) -> None:
        """Leave the open tables to the parent process, after a fork. This process opens its own."""
        self._rows_of_parent = self._rows
        self._rows = None

    def range_of(self, shard: int, number: int) -> SampleRange | None:
        """Return the range of a sample by its number in the tar; None if no table lists it.

        Raises ConfigError if a table belongs to other shards, and any error of reading the tables.
        """
        rows = self._open_rows()
        if rows is None:
            return None
        row_number = rows.row_with(shard, number)
        spans, version = self._spans_of(rows, shard, row_number)
        number_in_row = number - rows.first_of(row_number)
        span = spans.span(number_in_row)
        if span is None:
            return None
        start, stop = span
        key_hash = spans.key_hashes[number_in_row]
        gaps = spans.gaps_of(number_in_row)
        return SampleRange(shard, start, stop, key_hash, version, gaps)

    def is_known(self, shard: int, number: int) -> bool:
        """Return True if the range of a sample was looked up, or that of a neighbour in the table.

        `range_of` then reads nothing.
        """
        return self._rows is not None and self._rows.row_with(shard, number) in self._spans

    def has_ranges_in_row(self, shard: int, number: int) -> bool:
        """Return True if any sample in the same row of the table as this sample has a range.

        Then a sample without a range is an exception, which has to be read with its shard.
        Otherwise ranges are unknown for the whole shard. Raises as `range_of` does.
        """
        rows = self._open_rows()
        if rows is None:
            return False
        spans, _ = self._spans_of(rows, shard, rows.row_with(shard, number))
        # For a sample without a span, start and stop are equal. So the arrays are equal only if no
        # sample of the row has a span.
        return spans.starts != spans.stops

    def key_hashes(self, shard: int) -> array[int]:
        """Return the hash of each sample's key in a shard; see `tarindex.spans.key_hash`.

        Raises as `range_of` does; ConfigError if there are no tables.
        """
        rows = self._required_rows()
        key_hashes = array("I")
        for row_number in rows.rows_of(shard):
            spans, _ = self._spans_of(rows, shard, row_number)
            key_hashes += spans.key_hashes
        return key_hashes

    def keys(self) -> Iterator[str]:
        """Yield the keys of all samples in the tars. Raises as `key_hashes` does."""
        rows = self._required_rows()
        for shard in range(rows.shards):
            for row_number in rows.rows_of(shard):
                yield from self._checked_row(rows, shard, row_number)["keys"]

    def _required_rows(self) -> TableRows:
        """Return the rows of the tables. Raises ConfigError if there are no tables."""
        rows = self._open_rows()
        if rows is None:
            raise ConfigError(
                "samples are found by their keys in a table of samples, next to an index file, "
                "which is missing",
                url=next(iter(self._tables), None),
                remedy=NO_TABLES_REMEDY,
            )
        return rows

    def _open_rows(self) -> TableRows | None:
        """Open the tables if necessary, and return their rows; None if there are no tables.

        Raises ConfigError if the tables describe another number of shards than the manifest has.
        """
        if not self._may_have_tables:
            return None
        if self._rows is not None:
            return self._rows
        try:
            rows = TableRows.open(self._tables, self._sessions)
        except _MISSING_TABLE_ERRORS:
            self._may_have_tables = False
            return None
        if rows.shards != len(self.manifest):
            rows.close()
            raise ConfigError(
                f"the tables of samples describe {rows.shards} shards, but the index "
                f"files list {len(self.manifest)}",
                url=self._tables[0],
                remedy=TABLES_REMEDY,
            )
        self._rows = rows
        return rows

    def _spans_of(
        self, rows: TableRows, shard: int, row_number: int
    ) -> tuple[RowSpans, str | None]:
        """Return the spans of a row's samples, and the version of their tar when it was indexed."""
        if row_number not in self._spans:
            self._spans[row_number] = self._read_spans(rows, shard, row_number)
        return self._spans[row_number]

    def _read_spans(
        self, rows: TableRows, shard: int, row_number: int
    ) -> tuple[RowSpans, str | None]:
        """Read a row for `_spans_of`."""
        row = self._checked_row(rows, shard, row_number)
        try:
            spans = RowSpans.of(row, self._choice_of_members(shard))
            if compression_of(self.manifest.shards.urls[shard]) is not None:
                # The object is compressed, so offsets in the tar are not offsets in the object.
                # With each stop equal to its start, no sample has a span.
                spans = RowSpans(spans.starts, spans.starts, spans.key_hashes)
            return spans, row["version"]
        except INVALID_ROW as exn:
            raise invalid_row(exn, row["table"]) from exn

    def _checked_row(self, rows: TableRows, shard: int, row_number: int) -> Row:
        """Return a row by its number. Raises ConfigError if it belongs to another shard."""
        row = rows.row(row_number)
        ref = self.manifest[shard]
        # Number in the shard of the first sample after this row.
        is_last_of_shard = row_number + 1 == rows.rows_of(shard).stop
        end = ref.samples if is_last_of_shard else rows.first_of(row_number + 1)
        try:
            # The row was found by its position in the tables. It belongs to the shard only if it
            # names the shard's number of samples, and the version that the index file has.
            is_of_shard = row["samples"] == ref.samples
            is_complete = row["first"] + len(row["keys"]) == end
            is_same_version = ref.version in (None, row["version"])
        except INVALID_ROW as exn:
            raise invalid_row(exn, row["table"]) from exn
        if not (is_of_shard and is_complete and is_same_version):
            raise ConfigError(
                f"the table of samples does not match the index file: {ref.url} differs",
                url=row["table"],
                remedy=TABLES_REMEDY,
            )
        return row

    def _choice_of_members(self, shard: int) -> Callable[[str], bool] | None:
        """Return a function that chooses a shard's members by extension; None to read them all."""
        view = self._pipeline.view(shard)
        reads = view.reads  # returns True for the name of a member that is read; None if all are
        if reads is None:
            return None
        # In a join, a member's name in a sample is the source's prefix and the member's extension.
        prefix = view.prefix
        return lambda extension: reads(prefix + extension)
