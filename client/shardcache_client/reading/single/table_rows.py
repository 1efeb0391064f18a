"""Rows of tables of samples, found by shard and sample without reading the other rows.

A table of samples is itself a shard, written by `shardcache index --samples`, that describes other
shards. Each of its samples is a row: a JSON object about some successive samples of one described
shard. A row's key is the number of that shard, a dash, and the number of the first sample that the
row describes.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, Self

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.tables import keys_of
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow

Row = dict[str, Any]

TABLES_REMEDY = "write both files again: shardcache index URL... -o index.json --samples"
"""Remedy for tables that are invalid, or do not match their shards."""

NO_TABLES_REMEDY = (
    "write both: shardcache index URL... -o index.json --samples; then use index.json as the url"
)
"""Remedy if there are no tables, or no index file next to them."""

INVALID_ROW = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors that using a row may raise if it lacks fields, or has values of a wrong type."""


class TableRows:
    """The rows of some tables of samples. The tables stay cached until `close`.

    The numbers of rows and shards count through all tables. `open` makes this object.
    """

    def __init__(self, tables: Sequence[LeasedShard]) -> None:
        self._tables = tables
        self._opened = ExitStack()  # holds the session and the open tables until `close`
        self._table_ends = array("Q")  # for each table: number of the row after its last row
        self._shard_ends = array("Q")  # for each shard: number of the row after its last row
        self._firsts = array("Q")  # for each row: number in the shard of the row's first sample

    @classmethod
    def open(cls, urls: Sequence[str], sessions: ReaderSessions) -> Self:
        """Wait for tables, map them, and list their rows.

        Raises NotFoundError if a table is missing, ConfigError for a file of another kind, and
        other errors of reading the tables.
        """
        with ExitStack() as opened:
            session = opened.enter_context(closing(sessions.open()))
            # The daemon shows epochs by number; 0 stands for reading outside of an epoch.
            plan = Plan.of(Manifest.of(map(ShardRef, urls)), 0, range(len(urls)))
            session.declare(plan)
            window = ShardWindow(session, plan, partial=False)
            opened.callback(window.empty)
            window.ask(len(urls))
            # The number of samples in a table, here None, is not known before it is open.
            tables = [window.take(number, None) for number in range(len(urls))]
            # The window refers to the session, and `on_wait` refers back to the window. Such a
            # cycle would keep the session open after both are out of use.
            session.on_wait = None
            rows = cls(tables)
            for url, table in zip(urls, tables, strict=True):
                table.open()
                rows._add_table(url, table)
            rows._opened = opened.pop_all()
            return rows

    def _add_table(self, url: str, table: LeasedShard) -> None:
        """Add the rows of the next table, by their keys. Raises ConfigError for invalid keys."""
        # In the keys, shards are numbered within the table.
        shards_before = len(self._shard_ends)
        try:
            for key in keys_of(table.whole.index):
                shard, first = map(int, key.split(b"-"))
                self._add_row(shards_before + shard, first)
        except ValueError as exn:
            raise ConfigError(
                f"the table of samples is invalid ({exn})", url=url, remedy=TABLES_REMEDY
            ) from exn
        self._table_ends.append(len(self._firsts))

    def _add_row(self, shard: int, first: int) -> None:
        """Add the next row; raise ValueError if it is out of order.

        Args:
            shard: number of the shard that the row describes.
            first: number in that shard of the first sample that the row describes.
        """
        # Rows are ordered by shard, then by sample. The first row of a shard begins with sample 0.
        if shard == len(self._shard_ends) and first == 0:
            self._shard_ends.append(len(self._firsts))
        elif shard != len(self._shard_ends) - 1 or first <= self._firsts[-1]:
            raise ValueError(f"shard {shard}, sample {first} is out of order")
        self._firsts.append(first)
        self._shard_ends[shard] += 1

    def close(self) -> None:
        """Release the tables."""
        self._opened.close()

    @property
    def shards(self) -> int:
        """Number of shards that the tables cover."""
        return len(self._shard_ends)

    def rows_of(self, shard: int) -> range:
        """Return the numbers of a shard's rows."""
        start = self._shard_ends[shard - 1] if shard else 0
        return range(start, self._shard_ends[shard])

    def row_with(self, shard: int, sample: int) -> int:
        """Return the number of the row that describes a sample of a shard."""
        rows = self.rows_of(shard)
        return bisect_right(self._firsts, sample, rows.start, rows.stop) - 1

    def first_of(self, row: int) -> int:
        """Return the number, in its shard, of the first sample that a row describes."""
        return self._firsts[row]

    def row(self, number: int) -> Row:
        """Return a row by its number, with the url of the row's table added as "table".

        Raises ConfigError if the table has no valid row there.
        """
        table = bisect_right(self._table_ends, number)
        first_row = self._table_ends[table - 1] if table else 0
        sample = self._tables[table].sample(number - first_row)
        try:
            row = json.loads(sample["json"])
            return {"table": sample["__url__"], **row}
        except INVALID_ROW as exn:
            raise invalid_row(exn, sample["__url__"]) from exn


def invalid_row(exn: Exception, url: str) -> ConfigError:
    """Return the error for a table, given the error that using one of its rows has raised."""
    return ConfigError(f"the table of samples is invalid ({exn!r})", url=url, remedy=TABLES_REMEDY)
