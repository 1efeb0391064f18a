"""The catalogue: a diskcache database of sample counts, listings and versions.

Sample counts survive the eviction of their shard. Everything here can be rebuilt: the counts of
cached shards from their sidecars, the rest from the origin.
"""

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diskcache
import structlog

log = structlog.get_logger()

_SELECT = """
    SELECT key, mode, filename, value FROM Cache
    WHERE key IN (SELECT value FROM json_each(?))
"""
_COUNT = "SELECT COUNT(*) FROM Cache WHERE substr(key, 1, length(?)) = ?"

_PRAGMAS = (
    "locking_mode = EXCLUSIVE",
    "mmap_size = 0",
    "journal_mode = WAL",
    "synchronous = NORMAL",
)

# Errors of a damaged row, and of diskcache with a database whose content may be anything.
_DAMAGED = (
    pickle.UnpicklingError,
    zlib.error,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
_FAILURES = (*_DAMAGED, sqlite3.Error, diskcache.Timeout, OSError)

# Primary result codes that indicate a problem with the disk, the process or concurrent access, not
# a damaged database.
_NO_DAMAGE = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
)


Parse = Callable[[Any], Any]
"""Converts the JSON value of a row. Raises ValueError for a value that it cannot convert."""


class PicklelessDisk(diskcache.JSONDisk):  # type: ignore[misc]
    """JSONDisk whose keys are text, and which refuses pickled rows: they could execute code.

    JSONDisk compresses keys as well as values. As text, many rows are found by one statement, and
    counted by the beginning of their keys.
    """

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> Any:
        """Return the JSON value of a row."""
        if mode == diskcache.core.MODE_PICKLE:
            raise pickle.UnpicklingError("the catalogue holds JSON only")
        return super().fetch(mode, filename, value, read)

    def put(self, key: object) -> tuple[str, bool]:
        """Return a key as stored in a row."""
        return json.dumps(key), True

    def get(self, key: str, raw: bool) -> Any:
        """Return the JSON key of a row."""
        if not raw:
            raise pickle.UnpicklingError("the catalogue holds JSON only")
        return json.loads(key)


class _Database(diskcache.Cache):  # type: ignore[misc]
    """A diskcache for one process and one thread at a time, without memory-mapped files.

    If a mapped file were truncated, the daemon would die of SIGBUS. With exclusive locking, SQLite
    needs no shared memory for its write-ahead log; but that has to be set before the first access,
    hence the override of a private property. diskcache's own settings allow only a rollback journal
    instead: 4.6 ms per row instead of 0.04, and 290 ms instead of 60 to open a new folder (medians,
    ext4 on a shared virtual disk). It reads one row at a time: 3.4 s for a manifest of 100,000
    shards, instead of 1.0 s by one statement.
    """

    def __init__(self, folder: Path) -> None:
        settings = {
            "eviction_policy": "none",
            "cull_limit": 0,
            "tag_index": False,
            "sqlite_mmap_size": 0,
        }
        super().__init__(str(folder), disk=PicklelessDisk, **settings)

    @property
    def _con(self) -> sqlite3.Connection:
        con: sqlite3.Connection | None = getattr(self._local, "con", None)
        if con is None:
            con = self._open_connection()
            self._local.con = con
        return con

    def _open_connection(self) -> sqlite3.Connection:
        path = Path(self._directory) / diskcache.core.DBNAME
        con = sqlite3.connect(path, timeout=self._timeout, isolation_level=None)
        for pragma in _PRAGMAS:
            con.execute(f"PRAGMA {pragma}").fetchall()
        # diskcache sets attributes and pragmas by what is stored here, which may be damaged: it
        # gets the defaults.
        with contextlib.suppress(sqlite3.OperationalError):  # a new database has no such table
            con.execute("DELETE FROM Settings")
        return con

    def get_rows(self, keys: Sequence[Sequence[str]], parse: Parse) -> tuple[list[Any], list[str]]:
        """Read many rows.

        Returns:
            the value of each row, converted by `parse`, or None for a row that does not exist or
            is damaged; and the keys of the damaged ones, as stored.
        """
        names = [json.dumps(list(key)) for key in keys]
        values: dict[str, Any] = {}
        damaged: list[str] = []
        rows = self._sql(_SELECT, [json.dumps(names)]).fetchall()
        for name, mode, filename, value in rows:
            try:
                values[name] = parse(self.disk.fetch(mode, filename, value, read=False))
            except (*_DAMAGED, FileNotFoundError) as exn:  # a large value has a file of its own
                log.warning("catalogue row damaged; dropped", row=name, cause=str(exn))
                damaged.append(name)
        return [values.get(name) for name in names], damaged

    def drop_rows(self, names: Sequence[str]) -> None:
        """Delete rows by their keys, as stored."""
        for name in names:
            self.delete(json.loads(name))

    def count_rows(self, kind: str) -> int:
        """Return the number of rows of a kind."""
        begin = json.dumps([kind]).removesuffix("]")
        [[count]] = self._sql(_COUNT, [begin, begin]).fetchall()
        return int(count)


def _unchanged(value: Any) -> Any:
    return value


class Catalogue:
    """JSON rows under (kind, …) keys, accessed in one thread.

    It stays empty if the disk does not allow a database.

    Attributes:
        losses: how often damaged rows, or all of them, were dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Open the catalogue; replace it with an empty one if it is damaged. Blocks."""
        self._folder = folder
        self._database: _Database | None = None
        self.losses = 0
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._thread.submit(self._open).result()

    def reopen(self) -> None:
        """Open a new database if there is none, or the old one is gone with its folder. Blocks."""
        self._thread.submit(self._reopen).result()

    def close(self) -> None:
        """Close the database after pending calls have finished. Blocks."""
        self._thread.submit(self._disconnect)
        self._thread.shutdown()

    async def get(self, *key: str, parse: Parse = _unchanged) -> Any:
        """Return a row's value, converted by `parse`; None for a missing or damaged row."""
        [value] = await self.get_many([key], parse)
        return value

    async def get_many(self, keys: Sequence[Sequence[str]], parse: Parse = _unchanged) -> list[Any]:
        """Return the values of many rows, as `get` does for one."""

        def read(database: _Database) -> list[Any]:
            values, damaged = database.get_rows(keys, parse)
            if damaged:
                self.losses += 1
                database.drop_rows(damaged)
            return values

        return await self._in_thread(read) or [None] * len(keys)

    async def count(self, kind: str) -> int:
        """Return the number of rows of a kind."""
        return await self._in_thread(lambda database: database.count_rows(kind)) or 0

    async def put(self, value: object, *key: str) -> None:
        """Write a row; `value` must be JSON-serialisable."""
        await self._in_thread(lambda database: database.set(list(key), value))

    async def add_many(self, rows: Sequence[tuple[Sequence[str], object]]) -> None:
        """Write rows of a key and a value, skipping keys that already exist."""

        def add(database: _Database) -> None:
            with database.transact():
                for key, value in rows:
                    database.add(list(key), value)

        await self._in_thread(add)

    async def _in_thread(self, call: Callable[[_Database], Any]) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._guarded, call)

    # In the thread

    def _guarded(self, call: Callable[[_Database], Any]) -> Any:
        """Return the result of `call`; None without a database, or if it fails."""
        if self._database is None:
            return None
        try:
            return call(self._database)
        except _FAILURES as exn:
            # A lost row costs a listing; an error for the reader would cost a training run.
            log.warning("catalogue row lost", cause=str(exn))
            if _is_damage(exn):
                self._renew(exn)
            return None

    def _reopen(self) -> None:
        if self._database is None or not (self._folder / diskcache.core.DBNAME).exists():
            self._disconnect()
            self._open()

    def _open(self) -> None:
        """Connect to the database; replace it if it is damaged, do without if it is unusable."""
        try:
            self._connect()
        except _FAILURES as exn:
            if _is_damage(exn):
                self._renew(exn)
            else:
                log.warning(
                    "catalogue unusable; continuing without it",
                    folder=str(self._folder),
                    cause=str(exn),
                )

    def _connect(self) -> None:
        # Folder and database are the daemon's alone: it has every url.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / diskcache.core.DBNAME
        with contextlib.suppress(OSError):  # the disk cannot be written, or is another's
            self._folder.chmod(0o700)
            file.touch(0o600)
            file.chmod(0o600)  # SQLite gives its log the same mode
        database = _Database(self._folder)
        database.get_rows([["probe"]], _unchanged)  # damage shows at the first read, not on opening
        self._database = database

    def _disconnect(self) -> None:
        database = self._database
        self._database = None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _renew(self, cause: Exception) -> None:
        """Replace a damaged database by an empty one.

        The old one is removed last, and put back if the new one cannot be created.
        """
        log.warning(
            "catalogue damaged; creating a new one",
            folder=str(self._folder),
            cause=str(cause),
        )
        self.losses += 1
        self._disconnect()
        aside = self._folder.with_name(f"{self._folder.name}.damaged")
        try:
            _remove(aside)
            with contextlib.suppress(FileNotFoundError):
                self._folder.rename(aside)
            self._connect()
            _remove(aside)
        except _FAILURES as exn:  # the disk may be at fault, and the old catalogue be intact
            log.warning(
                "cannot create catalogue; continuing without it",
                folder=str(self._folder),
                cause=str(exn),
            )
            with contextlib.suppress(OSError):
                if aside.exists():
                    _remove(self._folder)
                    aside.rename(self._folder)


def _is_damage(exn: Exception) -> bool:
    """Return True if the error means that the database is damaged, so that a new one would help."""
    code = getattr(exn, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_CANTOPEN:
        # If this process can open other files, the fault lies with this one.
        return _can_open_files()
    if code is not None:
        primary_code = code & 0xFF
        return primary_code not in _NO_DAMAGE
    return isinstance(exn, (*_DAMAGED, sqlite3.Error, NotADirectoryError, FileExistsError))


def _can_open_files() -> bool:
    """Return False if the process has no descriptor left, which SQLite does not report."""
    with contextlib.suppress(OSError):
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return True
    return False


def _remove(path: Path) -> None:
    """Remove a file or folder; ignore what cannot be removed from a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
