"""The catalogue holds JSON, never runs data, and may be lost."""

import pickle
import sqlite3
import stat
from pathlib import Path

import diskcache

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
    """A reader whose manifest asks for it gets no error: the row is asked for at the origin again."""
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


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)
