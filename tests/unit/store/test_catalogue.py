"""The catalogue holds JSON, never runs data, and may be lost."""

import pickle
import sqlite3
import stat
import zlib
from contextlib import closing
from pathlib import Path

import diskcache
import pytest

from shardcache.store.catalogue import Catalogue


async def test_a_pickle_in_the_database_is_never_loaded(tmp_path: Path) -> None:
    """Whoever can write the database cannot make the daemon run what it holds."""
    catalogue = Catalogue(tmp_path)
    await catalogue.put("harmless", "shard", "url")
    catalogue.close()
    bomb = pickle.dumps(_Bomb(tmp_path / "exploded"))
    with sqlite3.connect(tmp_path / "cache.db") as database:
        database.execute("UPDATE Cache SET mode = ?, value = ?", (diskcache.core.MODE_PICKLE, bomb))
    database.close()
    again = Catalogue(tmp_path)
    assert await again.get("shard", "url") is None
    again.close()
    assert not (tmp_path / "exploded").exists()


async def test_a_row_that_is_not_compressed_json_counts_as_lost(tmp_path: Path) -> None:
    """The row is asked for at the origin again, and its reader gets no error."""
    catalogue = Catalogue(tmp_path)
    await catalogue.put("harmless", "shard", "url")
    catalogue.close()
    with sqlite3.connect(tmp_path / "cache.db") as database:
        database.execute("UPDATE Cache SET value = ?", (b"no zlib stream",))
    database.close()
    again = Catalogue(tmp_path)
    assert await again.get("shard", "url") is None
    assert await again.get_many([("shard", "url")]) == [None]
    again.close()


async def test_catalogue_is_readable_by_the_daemon_alone(tmp_path: Path) -> None:
    """A new one, and one of a former release, whatever the umask."""
    folder = tmp_path / "catalogue"
    for _ in range(2):
        catalogue = Catalogue(folder)
        await catalogue.put(1, "a")
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
        assert modes == {0o700, 0o600}
        catalogue.close()
        folder.chmod(0o755)
        (folder / "cache.db").chmod(0o644)


DEEP = zlib.compress(b"[" * 100_000 + b"]" * 100_000)
DAMAGES = [
    "UPDATE Cache SET value = NULL",
    "UPDATE Cache SET value = 5",
    "UPDATE Cache SET value = 'text'",
    "UPDATE Cache SET mode = NULL",
    "UPDATE Cache SET mode = 'x'",
    "UPDATE Cache SET mode = 2, filename = 7",
    "UPDATE Cache SET mode = 2, filename = 'missing'",
    "UPDATE Cache SET mode = 2, filename = NULL",
    f"UPDATE Cache SET value = x'{DEEP.hex()}'",
    "UPDATE Cache SET expire_time = 'soon', access_time = 'never', size = 'large', tag = 1.5",
    "UPDATE Settings SET key = key || '_' WHERE key LIKE '%size%'",
    "UPDATE Settings SET key = 'disk_' || key",
    "UPDATE Settings SET key = 'close' WHERE key = 'hits'",
    "UPDATE Settings SET key = 'sqlite_' || key",
    "UPDATE Settings SET value = 'text'",
    "UPDATE Settings SET value = NULL",
    "DELETE FROM Settings",
    (
        "DROP TABLE Settings; CREATE TABLE Settings (key, value); "
        "INSERT INTO Settings VALUES (1, 2), (NULL, 3)"
    ),
    "DROP TABLE Cache; CREATE TABLE Cache (key, value)",
    "DROP TABLE Cache; CREATE VIEW Cache AS SELECT * FROM Settings",
    "CREATE TRIGGER t BEFORE INSERT ON Cache BEGIN SELECT RAISE(ABORT, 'no'); END",
]


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_tables_cost_rows_and_no_more(tmp_path: Path, damage: str) -> None:
    """Any cells let the catalogue open, read sound rows, and be written again."""
    catalogue = Catalogue(tmp_path / "catalogue")
    await catalogue.put("here", "shard", "url")
    await catalogue.put("here", "probe")
    catalogue.close()
    with closing(sqlite3.connect(tmp_path / "catalogue" / "cache.db")) as database:
        database.executescript(damage)
        database.commit()

    again = Catalogue(tmp_path / "catalogue")
    assert await again.get("shard", "url") in ("here", None)
    await again.put("lost with the damage", "shard", "first")
    await again.put("written", "shard", "url")
    await again.put("x" * 100_000, "shard", "long")
    assert await again.get_many([("shard", "url"), ("shard", "other")]) == ["written", None]
    assert await again.get("shard", "long") == "x" * 100_000
    assert await again.count("shard") >= 2
    again.close()


async def test_damaged_row_is_dropped_and_its_neighbours_are_read(tmp_path: Path) -> None:
    """A bad row of a manifest costs no other, and is gone at the next read."""
    catalogue = Catalogue(tmp_path)
    keys = [("shard", str(number)) for number in range(3)]
    for number, key in enumerate(keys):
        await catalogue.put(number, *key)
    assert await catalogue.get_many(keys, _odd) == [None, 1, None]
    assert catalogue.losses == 1
    assert await catalogue.get_many(keys) == [None, 1, None]
    catalogue.close()


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("even")
    return value


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)
