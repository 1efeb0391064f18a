"""The catalogue: an SQLite database of sample counts, listings and versions, all of which may be lost.

Sample counts survive the eviction of their shard. Everything here can be rebuilt: the counts of cached shards from
their sidecars, the rest from the origin.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")

_FILE = "cache.db"
# If a mapped file were truncated, the daemon would die of SIGBUS. With exclusive locking, which has to be set before
# the first access, SQLite needs no shared memory for its write-ahead log. The last statement reads a page: damage shows
# at the first read, not on opening, and a database of another schema has no such column.
_OPENING = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA mmap_size = 0",
    "PRAGMA auto_vacuum = FULL",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    "CREATE TABLE IF NOT EXISTS Cache (key TEXT PRIMARY KEY, json BLOB NOT NULL)",
    "SELECT json FROM Cache LIMIT 1",
)
# One statement for many rows: one for each takes three times as long for a manifest of 100,000 shards.
_SELECT = "SELECT key, json FROM Cache WHERE key IN (SELECT value FROM json_each(?))"
_COUNT = "SELECT COUNT(*) FROM Cache WHERE substr(key, 1, length(?1)) = ?1"

_FAILURES = (sqlite3.Error, zlib.error, ValueError, OSError)
# Primary result codes that indicate a problem with the disk, the process or concurrent access, not a damaged database.
_NO_DAMAGE = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
)


class Catalogue:
    """JSON rows under (kind, …) keys, accessed in one thread; empty if the disk does not allow a database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._database: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "catalogue")

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the catalogue; replace it with an empty one if it is damaged. Blocks."""
        catalogue = cls(folder)
        catalogue.reopen()
        return catalogue

    def reopen(self) -> None:
        """Open a new database if there is none, or the old one disappeared with its folder. Blocks."""

        def renew() -> None:
            if self._database is None or not (self._folder / _FILE).exists():
                self._disconnect()
                self._open()

        self._thread.submit(renew).result()

    def close(self) -> None:
        """Close the database after pending calls have finished. Blocks."""
        self._thread.submit(self._disconnect)
        self._thread.shutdown()

    async def get(self, *key: str) -> Any:
        """Return a row's value, or None if there is no such row."""
        return (await self.get_many([key]))[0]

    async def get_many(self, keys: Sequence[Sequence[str]]) -> list[Any]:
        """Return the values of many rows, None for those that do not exist."""

        def read(database: sqlite3.Connection) -> list[Any]:
            names = [json.dumps(key) for key in keys]
            rows = database.execute(_SELECT, [json.dumps(names)])
            found = {name: json.loads(zlib.decompress(data)) for name, data in rows}
            return [found.get(name) for name in names]

        return await self._in_thread(read) or [None] * len(keys)

    async def count(self, kind: str) -> int:
        """Return the number of rows of a kind."""
        begin = json.dumps([kind]).removesuffix("]")
        return await self._in_thread(lambda database: int(database.execute(_COUNT, [begin]).fetchone()[0])) or 0

    async def put(self, value: object, *key: str) -> None:
        """Write a row; `value` must be JSON-serialisable."""
        await self._write("INSERT OR REPLACE INTO Cache VALUES (?, ?)", [(key, value)])

    async def add_many(self, rows: Sequence[tuple[Sequence[str], object]]) -> None:
        """Write rows of a key and a value, skipping keys that already exist."""
        await self._write("INSERT OR IGNORE INTO Cache VALUES (?, ?)", rows)

    async def _write(self, statement: str, rows: Sequence[tuple[Sequence[str], object]]) -> None:
        def write(database: sqlite3.Connection) -> None:
            written = ((json.dumps(key), zlib.compress(json.dumps(value).encode(), 1)) for key, value in rows)
            with database:
                database.executemany(statement, written)

        await self._in_thread(write)

    async def _in_thread(self, call: Callable[[sqlite3.Connection], T]) -> T | None:
        def guarded() -> T | None:
            if self._database is None:
                return None
            try:
                return call(self._database)
            except _FAILURES as exn:
                # A lost row costs a listing; an error for the reader would cost a training run.
                log.warning("catalogue row lost", cause=str(exn))
                if isinstance(exn, sqlite3.Error) and _is_damage(exn):
                    self._renew(exn)
                return None

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    # In the thread

    def _open(self) -> None:
        try:
            self._connect()
        except _FAILURES as exn:
            if _is_damage(exn):
                self._renew(exn)
            else:
                log.warning("catalogue unusable; continuing without it", folder=str(self._folder), cause=str(exn))

    def _connect(self) -> None:
        # Folder and database are the daemon's alone: it has every url.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / _FILE
        with contextlib.suppress(OSError):  # a disk that cannot be written, or another's file system
            self._folder.chmod(0o700)
            file.touch(0o600)
            file.chmod(0o600)  # SQLite gives its log the same mode
        with contextlib.ExitStack() as failing:
            database = failing.enter_context(contextlib.closing(sqlite3.connect(file)))
            for statement in _OPENING:
                database.execute(statement).fetchall()
            failing.pop_all()
        self._database = database

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _renew(self, cause: Exception) -> None:
        log.warning("catalogue damaged; creating a new one", folder=str(self._folder), cause=str(cause))
        self._disconnect()
        aside = self._folder.with_name(f"{self._folder.name}.damaged")
        try:
            _remove(aside)
            with contextlib.suppress(FileNotFoundError):
                self._folder.rename(aside)
            self._connect()
            _remove(aside)
        except _FAILURES as exn:  # the disk is at fault: the old catalogue may be intact
            log.warning("cannot create catalogue; continuing without it", folder=str(self._folder), cause=str(exn))
            with contextlib.suppress(OSError):
                if aside.exists():
                    _remove(self._folder)
                    aside.rename(self._folder)


def _is_damage(exn: Exception) -> bool:
    """Return True if the error means that the database is damaged, so that a new one would help."""
    code = getattr(exn, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF not in _NO_DAMAGE and (code != sqlite3.SQLITE_CANTOPEN or _can_open())
    return isinstance(exn, (sqlite3.Error, NotADirectoryError, FileExistsError))


def _can_open() -> bool:
    """Return False if the process has no descriptor left, which SQLite does not report."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a file or folder; ignore what cannot be removed from a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
