"""The catalogue holds JSON, never runs data, and may be lost."""

from __future__ import annotations

import pickle
import sqlite3
import stat
from pathlib import Path

import diskcache

from shardcache.store.catalogue import Catalogue


async def test_rows_outlive_a_restart(tmp_path: Path) -> None:
    """Entries are there after closing and opening again."""
    catalogue = Catalogue.open(tmp_path)
    await catalogue.put(["v1", 1000], "shard", "s3://b/a.tar")
    catalogue.close()
    again = Catalogue.open(tmp_path)
    assert await again.get("shard", "s3://b/a.tar") == ["v1", 1000]
    assert await again.get_many([("shard", "none"), ("shard", "s3://b/a.tar")]) == [None, ["v1", 1000]]
    again.close()


async def test_a_pickle_in_the_database_is_never_loaded(tmp_path: Path) -> None:
    """Whoever can write the database cannot make the daemon run what it holds."""
    catalogue = Catalogue.open(tmp_path)
    await catalogue.put("harmless", "shard", "url")
    catalogue.close()
    bomb = pickle.dumps(_Bomb(tmp_path / "exploded"))
    with sqlite3.connect(tmp_path / "cache.db") as database:
        database.execute("UPDATE Cache SET mode = ?, value = ?", (diskcache.core.MODE_PICKLE, bomb))
    database.close()
    again = Catalogue.open(tmp_path)
    assert await again.get("shard", "url") is None
    again.close()
    assert not (tmp_path / "exploded").exists()


async def test_catalogue_is_readable_by_the_daemon_alone(tmp_path: Path) -> None:
    """A new one, and one of a former release, whatever the umask."""
    folder = tmp_path / "catalogue"
    for _ in range(2):
        catalogue = Catalogue.open(folder)
        await catalogue.put(1, "a")
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
        assert modes == {0o700, 0o600}
        catalogue.close()
        folder.chmod(0o755)
        (folder / "cache.db").chmod(0o644)


async def test_damaged_database_is_recreated(tmp_path: Path) -> None:
    """Losing the catalogue costs listings, not the start of the daemon."""
    folder = tmp_path / "catalogue"
    Catalogue.open(folder).close()
    (folder / "cache.db").write_bytes(b"garbage" * 1000)
    catalogue = Catalogue.open(folder)
    await catalogue.put(1, "a")
    assert await catalogue.get("a") == 1
    catalogue.close()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)
