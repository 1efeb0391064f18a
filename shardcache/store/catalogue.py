"""The catalogue: a diskcache database of sample counts, listings and versions.

The daemon keeps here what it has learnt from origins, and from shards that it has indexed: the
number of samples of a shard stays known after the shard was evicted. Nothing in the catalogue is
needed for correctness, and all of it can be rebuilt: the counts of cached shards from their
sidecars, the rest from the origin. So a damaged catalogue is replaced by an empty one, and a
failing disk only makes requests slower.

A row is a JSON value under a key, which is a tuple of texts. The key's first text is the row's
kind, such as counts or listings.
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

# The reasons for these settings are in `_Database`.
_PRAGMAS = (
    "locking_mode = EXCLUSIVE",
    "mmap_size = 0",
    "journal_mode = WAL",
    "synchronous = NORMAL",
)

# Errors that damaged rows or settings of a database cause, in this module or in diskcache.
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
    """JSONDisk whose keys are text, and which refuses pickled rows.

    Reading a pickled row could execute code. JSONDisk compresses keys as well as values. If keys
    are text instead, one statement can find many rows, or count the rows whose keys begin alike.
    """

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> Any:
        """Return the JSON value of a row."""
        if mode == diskcache.core.MODE_PICKLE:
            raise pickle.UnpicklingError("the catalogue holds JSON only")
        return super().fetch(mode, filename, value, read)

    def put(self, key: object) -> tuple[str, bool]:
        """Return a key as stored in a row."""
        is_raw = True  # the key is stored as it is, not pickled
        return json.dumps(key), is_raw

    def get(self, key: str, raw: bool) -> Any:
        """Return the JSON key of a row."""
        if not raw:
            raise pickle.UnpicklingError("the catalogue holds JSON only")
        return json.loads(key)


class _Database(diskcache.Cache):  # type: ignore[misc]
    """A diskcache for one process and one thread at a time, without memory-mapped files.

    SQLite must not map files: if a mapped file were truncated, the daemon would die of SIGBUS. But
    its write-ahead log needs mapped shared memory, unless the database is locked exclusively. The
    locking mode has to be set before the first access. diskcache has no setting for that, so this
    class overrides a private property (`_con`). The alternative, a rollback journal, takes 4.6 ms
    per row instead of 0.04, and 290 ms instead of 60 to open a new folder (medians, ext4 on a
    shared virtual disk).

    diskcache reads one row at a time, which takes 3.4 s for a manifest of 100,000 shards.
    `get_rows` takes 1.0 s, with one statement.
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
        """The connection of the present thread, which diskcache uses for every access."""
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
        # diskcache stores its settings in this table, and would set its attributes and pragmas by
        # them. They may be damaged, so they are deleted, and diskcache uses those of `__init__`.
        with contextlib.suppress(sqlite3.OperationalError):  # a new database has no such table
            con.execute("DELETE FROM Settings")
        return con

    def get_rows(self, keys: Sequence[Sequence[str]], parse: Parse) -> tuple[list[Any], list[str]]:
        """Read many rows.

        Args:
            keys: the keys of the rows.
            parse: converts a row's JSON value; a ValueError from it means that the row is damaged.

        Returns:
            the value of each row, in the order of `keys`, or None for a row that does not exist or
            is damaged; and the keys of the damaged rows, in the form in which they are stored.
        """
        stored_keys = [json.dumps(list(key)) for key in keys]
        values: dict[str, Any] = {}
        damaged: list[str] = []
        rows = self._sql(_SELECT, [json.dumps(stored_keys)]).fetchall()
        for stored_key, mode, filename, value in rows:
            try:
                values[stored_key] = parse(self.disk.fetch(mode, filename, value, read=False))
            # FileNotFoundError: diskcache stores a large value in a file of its own.
            except (*_DAMAGED, FileNotFoundError) as exn:
                log.warning("catalogue row damaged; dropped", row=stored_key, cause=str(exn))
                damaged.append(stored_key)
        return [values.get(stored_key) for stored_key in stored_keys], damaged

    def drop_rows(self, stored_keys: Sequence[str]) -> None:
        """Delete rows, given their keys in the form in which they are stored."""
        for stored_key in stored_keys:
            self.delete(json.loads(stored_key))

    def count_rows(self, kind: str) -> int:
        """Return the number of rows of a kind."""
        # A stored key is a JSON list whose first item is the kind.
        beginning = json.dumps([kind]).removesuffix("]")
        [[count]] = self._sql(_COUNT, [beginning, beginning]).fetchall()
        return int(count)


def _unchanged(value: Any) -> Any:
    """Stand in for the `parse` function of rows that need no conversion."""
    return value


class Catalogue:
    """JSON rows under (kind, …) keys, accessed in one thread.

    The catalogue stays empty if the disk does not allow a database. Its methods raise no errors of
    the database: rows that cannot be read count as missing, and rows that cannot be written are
    lost.

    Attributes:
        losses: number of times that damaged rows, or a whole damaged database, were dropped.
    """

    def __init__(self, folder: Path) -> None:
        """Open the catalogue; replace it with an empty one if it is damaged. Blocks."""
        self._folder = folder
        self._database: _Database | None = None
        self.losses = 0
        self._thread = ThreadPoolExecutor(1, "catalogue")
        self._thread.submit(self._open).result()

    def reopen(self) -> None:
        """Open a new database if none is open, or if the file of the open one is gone. Blocks."""
        self._thread.submit(self._reopen).result()

    def close(self) -> None:
        """Close the database once the pending calls have finished. Blocks."""
        self._thread.submit(self._disconnect)
        self._thread.shutdown()

    async def get(self, *key: str, parse: Parse = _unchanged) -> Any:
        """Return a row's value, converted by `parse`; None if the row is missing or damaged."""
        [value] = await self.get_many([key], parse)
        return value

    async def get_many(self, keys: Sequence[Sequence[str]], parse: Parse = _unchanged) -> list[Any]:
        """Return the values of many rows, each as `get` returns it."""

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
        """Call a function with the database, in the catalogue's thread; see `_guarded`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._guarded, call)

    # The methods below run in the catalogue's thread.

    def _guarded(self, call: Callable[[_Database], Any]) -> Any:
        """Return the result of `call`; None if the call fails, or there is no database."""
        if self._database is None:
            return None
        try:
            return call(self._database)
        except _FAILURES as exn:
            # The error is not raised: a lost row costs one request to the origin, while an error
            # for the reader could cost a training run.
            log.warning("catalogue row lost", cause=str(exn))
            if _is_damage(exn):
                self._renew(exn)
            return None

    def _reopen(self) -> None:
        if self._database is None or not (self._folder / diskcache.core.DBNAME).exists():
            self._disconnect()
            self._open()

    def _open(self) -> None:
        """Connect to the database.

        A damaged database is replaced. If the database is unusable for another reason, such as a
        failing disk, the catalogue works without one.
        """
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
        """Open the database. Raises one of `_FAILURES` if that fails or the database is damaged."""
        # Only the daemon may read the folder and the database, as they contain every url.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / diskcache.core.DBNAME
        # An error means that the disk cannot be written, or that another user owns the files.
        with contextlib.suppress(OSError):
            self._folder.chmod(0o700)
            file.touch(0o600)
            file.chmod(0o600)  # SQLite gives its write-ahead log the same mode
        database = _Database(self._folder)
        # A row is read because damage shows at the first read, not when the database is opened.
        database.get_rows([["probe"]], _unchanged)
        self._database = database

    def _disconnect(self) -> None:
        database = self._database
        self._database = None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()

    def _renew(self, cause: Exception) -> None:
        """Replace a damaged database by an empty one.

        The old database is removed only after the new one is open. If the new one cannot be
        created, the old one is put back.
        """
        log.warning(
            "catalogue damaged; creating a new one",
            folder=str(self._folder),
            cause=str(cause),
        )
        self.losses += 1
        self._disconnect()
        old_folder = self._folder.with_name(f"{self._folder.name}.damaged")
        try:
            _remove(old_folder)  # which an earlier call may have left
            with contextlib.suppress(FileNotFoundError):
                self._folder.rename(old_folder)
            self._connect()
            _remove(old_folder)
        except _FAILURES as exn:
            # The fault may lie with the disk, and the old database may be intact after all. It is
            # put back for the next start of the daemon.
            log.warning(
                "cannot create catalogue; continuing without it",
                folder=str(self._folder),
                cause=str(exn),
            )
            with contextlib.suppress(OSError):
                if old_folder.exists():
                    _remove(self._folder)
                    old_folder.rename(self._folder)


def _is_damage(exn: Exception) -> bool:
    """Return True if an error means that the database is damaged, so that a new one would help."""
    code = getattr(exn, "sqlite_errorcode", None)
    if code == sqlite3.SQLITE_CANTOPEN:
        # If this process can open other files, the fault lies with the database's file.
        return _can_open_files()
    if code is not None:
        # The low byte is SQLite's primary result code; the rest of the code has details.
        primary_code = code & 0xFF
        return primary_code not in _NO_DAMAGE
    return isinstance(exn, (*_DAMAGED, sqlite3.Error, NotADirectoryError, FileExistsError))


def _can_open_files() -> bool:
    """Return False if the process has no descriptor left.

    SQLite reports this case in the same way as a file that it cannot open.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        return True
    return False


def _remove(path: Path) -> None:
    """Remove a file, or a folder with its contents; ignore contents that cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
