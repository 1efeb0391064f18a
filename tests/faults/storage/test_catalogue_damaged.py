"""A randomly damaged catalogue: the daemon starts, and every shard's bytes are right."""

import json
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from shardcache_client.reader import ShardReader
from support.cases import examples
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import write_indexed, write_shards

pytestmark = pytest.mark.slow

# Each takes a start of the daemon and two readings of all shards: about a second.
EXAMPLES = 15


@dataclass(frozen=True, slots=True)
class Damage:
    """One change of a database; its numbers choose among the columns and rows that there are."""

    kind: str
    table: str
    column: int
    row: int | None  # None for all rows
    value: object

    def apply(self, database: sqlite3.Connection) -> None:
        """Change the database, except for what SQLite refuses or an earlier change has removed."""
        columns = [name for _, name, *_ in database.execute(f"PRAGMA table_info({self.table})")]
        if not columns:
            return
        column = columns[self.column % len(columns)]
        with suppress(sqlite3.Error):
            match self.kind:
                case "drop":
                    database.execute(f"DROP TABLE {self.table}")
                case "empty":
                    database.execute(f"DELETE FROM {self.table}")
                case "rename":
                    database.execute(f"ALTER TABLE {self.table} RENAME COLUMN {column} TO other")
                case "change":
                    self._change(database, column)

    def _change(self, database: sqlite3.Connection, column: str) -> None:
        rows = [number for (number,) in database.execute(f"SELECT rowid FROM {self.table}")]
        if rows and self.row is not None:
            rows = [rows[self.row % len(rows)]]
        for number in rows:
            database.execute(
                f"UPDATE {self.table} SET {column} = ? WHERE rowid = ?", (self.value, number)
            )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NESTED = "[" * 5000 + "]" * 5000
VALUES = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.binary(max_size=100)
    | st.sampled_from([NESTED, zlib.compress(NESTED.encode()), b"\x80\x04\x95", "../../outside"])
    | JSON.map(lambda value: zlib.compress(json.dumps(value).encode()))
)
NUMBERS = st.integers(0, 99)
TABLES = st.sampled_from(["Cache", "Cache", "Cache", "Settings"])
CELL = st.builds(Damage, st.just("change"), TABLES, NUMBERS, st.none() | NUMBERS, VALUES)
FORM = st.builds(
    Damage, st.sampled_from(["drop", "empty", "rename"]), TABLES, NUMBERS, st.none(), st.none()
)
# After a change of a table's form, the catalogue is made again, whatever its cells hold: most
# examples have none.
CELLS = st.lists(CELL, min_size=4, max_size=20)
CHANGES = st.one_of(CELLS, CELLS, CELLS, st.lists(CELL | FORM, min_size=1, max_size=4))


@dataclass(frozen=True, slots=True)
class Ground:
    """A daemon that has been stopped, and what it had cached by a prefix and by an index file."""

    daemon: Daemon
    urls: list[str]
    samples: list[dict[str, Any]] = field(repr=False)
    catalogue: Path  # a copy of the catalogue, as the daemon left it

    def damage(self, changes: list[Damage]) -> None:
        """Put the copy in the catalogue's place, and change its database."""
        folder = self.daemon.cache_dir / "catalogue"
        shutil.rmtree(folder)
        shutil.copytree(self.catalogue, folder)
        with closing(sqlite3.connect(folder / "cache.db", isolation_level=None)) as database:
            for change in changes:
                change.apply(database)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """A folder of shards, and an index of others, that have been read once."""
    with tempfile.TemporaryDirectory(prefix="shardcache-c-") as name:
        root = Path(name)
        (root / "shards").mkdir()
        (root / "daemon").mkdir()
        write_shards(root / "shards", 3, 4, {"bin": 10})
        urls = [f"file://{root}/shards/", write_indexed(root / "indexed", [3, 4])]
        daemon = Daemon(root / "daemon")
        with daemon:
            samples = read(daemon, urls)
            assert daemon.stop() == 0
        shutil.copytree(daemon.cache_dir / "catalogue", root / "copy")
        yield Ground(daemon, urls, samples, root / "copy")


def read(daemon: Daemon, urls: list[str]) -> list[dict[str, Any]]:
    """Return all samples of all urls."""
    readers = [ShardReader(url, socket=daemon.socket, timeout_s=GUARD_S) for url in urls]
    return [dict(sample) for reader in readers for sample in reader]


# A failing example is not made smaller: that would take hundreds of starts.
@examples(
    EXAMPLES,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(changes=CHANGES)
def test_catalogue_in_which_anything_may_be_costs_no_shard(
    changes: list[Damage], ground: Ground
) -> None:
    """Dropped, emptied or renamed tables and columns of any type lose or refetch nothing."""
    ground.damage(changes)
    with ground.daemon as daemon:
        assert read(daemon, ground.urls) == ground.samples
        assert read(daemon, ground.urls) == ground.samples
        assert daemon.status()["counters"]["origin_bytes"] == 0
