"""Tables of rows that are made once per node and user, and mapped by all of the user's processes.

A table is a file in which a row is found by its key; see `row_index`. Samples are joined with the
rows. The file lies in a folder of the user below the folder for temporary files (`TMPDIR`), and its
name is a hash of everything that its content depends on. A table that was not opened for a week is
removed when another table is made; processes that have mapped it keep it until they end.
"""

import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from shardcache.shared.exceptions import CacheDirError, ShardcacheError
from shardcache_client.tables import row_index
from shardcache_client.tables.row_index import RowIndex

log = logging.getLogger("shardcache")

_SUFFIX = ".rows"

_OTHER_FOLDER = "export TMPDIR=…, a folder on a local disk in which you may write"  # a remedy
# Time for which a table is kept after it was last opened.
_MAX_UNUSED_S = 7 * 24 * 3600.0
# Interval at which a process that makes a table logs its progress.
_REPORT_INTERVAL_S = 10.0
# Number of rows after which the clock is read, which would take too long for each row.
_ROWS_PER_CLOCK_READ = 4096


class NodeTable:
    """A table of rows of this node. Can be pickled: another process opens the same file."""

    def __init__(self, path: Path) -> None:
        """Map a table's file.

        Raises CacheDirError if the file is damaged, OSError if it cannot be read.
        """
        self._path = path
        self.index = RowIndex(path)
        os.utime(path)  # the time of the last use, for `_remove_unused`

    def __repr__(self) -> str:
        return f"NodeTable({self._path.name!r}, rows={len(self.index)})"

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        return type(self), (self._path,)


def shared_table(
    identity: Iterable[str],
    rows: Callable[[], Iterable[tuple[str, str]]],
    url: str,
) -> NodeTable:
    """Return a table. Make its file if it does not exist yet.

    If several processes want the table, one makes it. The others wait until it is made, or until
    that process ends. A file that was cut, as by a power failure, is made again.

    Args:
        identity: everything that the rows depend on, such as the version of their source.
        rows: returns the rows, each as its key and its line in the table; see `row_index.write`. It
            must not raise plain OSErrors, which would count as errors of the folder.
        url: url of the source, for messages.

    Raises CacheDirError if the folder cannot be used, and the errors of `rows`.
    """
    digest = hashlib.sha256("\0".join(identity).encode("utf-8", "surrogatepass")).hexdigest()
    folder = _own_folder()
    path = folder / f"{digest[:32]}{_SUFFIX}"
    try:
        with suppress(FileNotFoundError, CacheDirError):  # not made yet, or cut
            return NodeTable(path)
        with _MakingLock(path.with_suffix(".lock"), url):
            # Another process may have made the table while this process waited for the lock.
            with suppress(FileNotFoundError, CacheDirError):
                return NodeTable(path)
            _remove_unused(folder)
            _make(path, rows, url)
            return NodeTable(path)
    except ShardcacheError:  # some errors of shardcache are OSErrors as well, and pass unchanged
        raise
    except OSError as exn:
        raise CacheDirError(
            f"the table's rows cannot be kept in {folder} ({exn.strerror})",
            url=url,
            remedy="export TMPDIR=…, a folder on a local disk with space for the table",
        ) from exn


def _own_folder() -> Path:
    """Return the folder of this user's tables. Create it if it is missing.

    Raises CacheDirError if the folder cannot be created, is another user's, or is open to others.
    """
    folder = Path(tempfile.gettempdir()) / f"shardcache-tables-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as exn:
        raise CacheDirError(
            f"the folder {folder} cannot be created ({exn.strerror})",
            remedy=_OTHER_FOLDER,
        ) from exn
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own:
        raise CacheDirError(
            f"{folder} is not a folder of this user, so its tables may be another user's",
            remedy=f"remove it; or {_OTHER_FOLDER}",
        )
    is_open_to_others = bool(status.st_mode & 0o077)
    if is_open_to_others:
        raise CacheDirError(
            f"other users can write to {folder}, or read it, so its tables may be theirs",
            remedy=f"remove it, or make it yours alone: chmod 700 {folder}",
        )
    return folder


class _MakingLock:
    """The lock that a process holds, by `with`, while it makes a table. Others wait for it.

    Args:
        path: path of the lock's file.
        url: url of the table's source, for the log.
    """

    def __init__(self, path: Path, url: str) -> None:
        self._path = path
        self._url = url

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process of this node reads the rows of %s; waiting", self._url)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.utime(self._fd)  # so that `_remove_unused` keeps the lock

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def _make(path: Path, rows: Callable[[], Iterable[tuple[str, str]]], url: str) -> None:
    """Make a table's file, which gets its name only once it is complete.

    Args:
        path: path of the file.
        rows: returns the rows; see `shared_table`.
        url: url of the source, for the log.
    """
    begun_s = time.monotonic()
    log.info("reading the rows of %s, once for this node", url)
    fd, draft_name = tempfile.mkstemp(dir=path.parent)
    draft = Path(draft_name)
    try:
        with os.fdopen(fd, "wb") as file:
            counts = row_index.write(file, _with_progress(rows(), url), temp_folder=path.parent)
            # The bytes have to be on the disk before the file gets its name. After a power failure,
            # they could be missing, and only the end of a table is checked when it is opened.
            file.flush()
            os.fsync(fd)
        draft.rename(path)
    except BaseException:
        draft.unlink()
        raise
    log.info("read %d rows of %s in %.1f s", counts.rows, url, time.monotonic() - begun_s)
    if counts.repeated:
        log.warning(
            "%d of the rows of %s have a key that an earlier row has, too: a sample with several "
            "rows is treated as one without a row",
            counts.repeated,
            url,
        )


def _with_progress(rows: Iterable[tuple[str, str]], url: str) -> Iterator[tuple[str, str]]:
    """Yield the rows, and log their number so far every `_REPORT_INTERVAL_S`.

    This is logged as a warning: the training waits, and programs show no lower level by default.
    """
    begun_s = time.monotonic()
    next_report_s = begun_s + _REPORT_INTERVAL_S
    for count, row in enumerate(rows):
        if count % _ROWS_PER_CLOCK_READ == 0 and time.monotonic() >= next_report_s:
            took_s = time.monotonic() - begun_s
            log.warning("reading the rows of %s: %s rows in %.0f s", url, f"{count:,}", took_s)
            next_report_s = time.monotonic() + _REPORT_INTERVAL_S
        yield row


def _remove_unused(folder: Path) -> None:
    """Remove tables that were not opened for a week, and drafts and locks as old as that."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may have removed the file
            if time.time() - path.stat().st_mtime > _MAX_UNUSED_S:
                path.unlink()
