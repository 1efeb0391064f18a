"""Tables that one process of a node makes, and the log of the processes that want them."""

import logging
import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from shardcache_client.tables import node_tables

URL = "s3://bucket/rows.parquet"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_tables.tempfile, "tempdir", str(tmp_path))


def test_progress_is_logged_while_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_tables, "_REPORT_INTERVAL_S", 0.0)
    table = node_tables.shared_table(["progress"], lambda: _rows(10_000), URL)
    assert len(table.index) == 10_000
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.rpartition(" in ")[0] for line in lines] == [
        f"reading the rows of {URL}: {count} rows" for count in ("0", "4,096", "8,192")
    ]


def test_process_that_waits_for_the_rows_says_so(caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("fork")
    began = context.Event()
    goes_on = context.Event()
    maker = context.Process(target=_make_slowly, args=(began, goes_on))
    maker.start()
    began.wait()
    try:
        # The line is logged just before the wait, which ends when the maker goes on.
        node_tables.log.addFilter(lambda record: goes_on.set() or True)
        table = node_tables.shared_table(["waiting"], _refused, URL)
    finally:
        node_tables.log.filters.clear()
        goes_on.set()
        maker.join()
    assert table.index.rows("key 0") == [{"v": 0}]
    assert f"another process of this node reads the rows of {URL}; waiting" in caplog.messages


def _make_slowly(began: Event, goes_on: Event) -> None:
    """Make a table whose second row comes only once others wait for it."""

    def rows() -> Iterator[tuple[str, str]]:
        yield from _rows(1)
        began.set()
        goes_on.wait()

    node_tables.shared_table(["waiting"], rows, URL)


def _rows(count: int) -> Iterator[tuple[str, str]]:
    for number in range(count):
        yield f"key {number}", f'["key {number}", {{"v": {number}}}]'


def _refused() -> Iterator[tuple[str, str]]:
    raise AssertionError("the rows are read twice")
