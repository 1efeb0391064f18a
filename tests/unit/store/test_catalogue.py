"""The catalogue holds JSON for the daemon alone, and may be lost."""

import pickle
import sqlite3
import stat
from pathlib import Path

import pytest

from shardcache.store.catalogue import Catalogue


@pytest.mark.parametrize("content", [pickle.dumps("harmless"), b"", b"x\x9c"])
async def test_a_row_of_anything_but_json_counts_as_lost(tmp_path: Path, content: bytes) -> None:
    """Whoever can write the database cannot make the daemon load what it holds, or fail."""
    catalogue = Catalogue.open(tmp_path)
    await catalogue.put("harmless", "shard", "url")
    catalogue.close()
    with sqlite3.connect(tmp_path / "cache.db") as database:
        assert database.execute("UPDATE Cache SET json = ?", (content,)).rowcount == 1
    database.close()
    again = Catalogue.open(tmp_path)
    assert await again.get("shard", "url") is None
    again.close()


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
