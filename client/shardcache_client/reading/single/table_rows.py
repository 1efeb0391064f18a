"""Rows of sample tables, found by shard and sample without reading the others."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any, Self

from shardcache.errors import ConfigError
from shardcache.shared.protocol import ShardRef
from shardcache.tarindex.tables import keys_of
from shardcache_client.daemon.reader_sessions import ReaderSessions
from shardcache_client.order.shards.declared_plan import Plan
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reading.leased.leased_shard import LeasedShard
from shardcache_client.reading.leased.shard_window import ShardWindow

Row = dict[str, Any]

TABLES_REMEDY = "write both files again: shardcache index URL... -o index.json --samples"

INVALID_ROW = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors of a row that has other fields than it should, or values of other types."""


class TableRows:
    """The rows of some sample tables, which stay cached until `close`.

    Rows are numbered through all tables.
    """

    def __init__(self, tables: Sequence[LeasedShard]) -> None:
        self._tables = tables
        self._opened = ExitStack()  # closed by `close`
        self._ends = array("Q")  # for each table: number of rows up to its end
        self._firsts = array("Q")  # for each row: number of its first sample in the shard
        self._shard_ends = array("Q")  # for each shard: number of rows up to its last one

    @classmethod
    def open(cls, urls: Sequence[str], sessions: ReaderSessions) -> Self:
        """Wait for tables, and list their rows.

        Raises NotFoundError if one is missing, ConfigError for a file of another kind, and other
        errors of reading them.
        """
        with ExitStack() as opened:
            session = opened.enter_context(closing(sessions.open()))
            plan = Plan.of(Manifest.of(map(ShardRef, urls)), 0, range(len(urls)))
            session.declare(plan)
            window = ShardWindow(session, plan, partial=False)
            opened.callback(window.empty)
            window.ask(len(urls))
            tables = [window.take(number, None) for number in range(len(urls))]
            session.on_wait = None  # a cycle would keep the session of a reader that is gone
            rows = cls(tables)
            for url, table in zip(urls, tables, strict=True):
                table.open()
                rows._add(url, table)
            rows._opened = opened.pop_all()
            return rows

    def _add(self, url: str, table: LeasedShard) -> None:
        """Add the rows of the next table, as their keys name them: shard, dash, first sample."""
        shards_before = len(self._shard_ends)
        try:
            for key in keys_of(table.whole.index):
                shard, first = map(int, key.split(b"-"))
                self._add_row(shards_before + shard, first)
        except ValueError as exn:
            raise ConfigError(
                f"the table of samples is invalid ({exn})", url=url, remedy=TABLES_REMEDY
            ) from exn
        self._ends.append(len(self._firsts))

    def _add_row(self, shard: int, first: int) -> None:
        """Add the next row; raise ValueError if it is out of order.

        Args:
            shard: number of its shard.
            first: number in the shard of its first sample.
        """
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
        """Return the number of the row with a sample of a shard."""
        rows = self.rows_of(shard)
        return bisect_right(self._firsts, sample, rows.start, rows.stop) - 1

    def first_of(self, row: int) -> int:
        """Return the number in its shard of a row's first sample."""
        return self._firsts[row]

    def row(self, number: int) -> Row:
        """Return a row by its number, with the url of its table as "table".

        Raises ConfigError if it is not a row.
        """
        table = bisect_right(self._ends, number)
        start = self._ends[table - 1] if table else 0
        sample = self._tables[table].sample(number - start)
        try:
            row = json.loads(sample["json"])
            return {"table": sample["__url__"], **row}
        except INVALID_ROW as exn:
            raise invalid_row(exn, sample["__url__"]) from exn


def invalid_row(exn: Exception, url: str) -> ConfigError:
    """Return the error for a table, given the error that one of its rows has raised."""
    return ConfigError(f"the table of samples is invalid ({exn!r})", url=url, remedy=TABLES_REMEDY)
