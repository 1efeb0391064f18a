"""An object as an open file, of which only what is read is fetched; `open_cached` returns it.

A library that needs a file on the local disk asks for its path (`name`) or descriptor (`fileno`).
Then the whole object is fetched, and this file reads from the cached file from then on.

A session is one reader's connection to the daemon. It has a plan, here of one object, which says
whether ranges of the object are read, or the whole file.
"""

import errno
import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from threading import RLock
from typing import Any

from shardcache.shared.protocol import ShardRef, Wanted
from shardcache.shared.wording.redact import redact
from shardcache_client.daemon.lease import Grant
from shardcache_client.daemon.session import Session
from shardcache_client.files.cached_file import CachedFile
from shardcache_client.files.range_file import RangeFile
from shardcache_client.files.read_ahead import DEFAULT_BLOCK_BYTES, ReadAhead
from shardcache_client.order.shards.manifest import Manifest

OpenSession = Callable[[Manifest, Wanted], AbstractContextManager[Session]]
"""Opens a session with a plan of all objects of a manifest, to be read as `Wanted` says."""

# Size of an `ObjectReader`'s buffer. After a jump, up to twice as many bytes are fetched in
# addition to those that are read, which is little in comparison with the size of a part.
_BUFFER_BYTES = 8 * 1024

# A range of bytes that no object has.
_BEYOND_END = (2**62, 2**62 + 1)


class ObjectReader(io.BufferedReader):
    """An object that is open for reading. Can be used by any thread.

    Args:
        open_session: opens the sessions by which the object is read.
        url: url of the object.

    Raises any error of `Session.wait`, as do all methods that read.
    """

    def __init__(self, open_session: OpenSession, url: str) -> None:
        super().__init__(RawObject(open_session, url), _BUFFER_BYTES)

    def __repr__(self) -> str:
        # That of `BufferedReader` shows the `name`, for which the whole object would be fetched.
        return f"ObjectReader({self.raw!r})"


class RawObject(io.RawIOBase):
    """An object without a buffer. Each read fetches a range, unless the cached file is open.

    The cached file is opened once the whole object is cached, once one call reads all of the
    object, or once the cached file's path or descriptor is asked for.

    Args:
        open_session, url: as for `ObjectReader`.
    """

    mode = "rb"

    def __init__(self, open_session: OpenSession, url: str) -> None:
        self._open_session = open_session
        # One thread may ask for the descriptor while another one reads.
        self._lock = RLock()
        self._position = 0  # offset of the next byte to read, unless the cached file is open
        self._ranges: RangeFile | None = None  # None before the first read
        self._read_ahead: ReadAhead | None = None  # reads from `_ranges`
        self._cached_file: io.FileIO | None = None  # once it is open
        self._opened = ExitStack()  # closes `_ranges` or `_cached_file`, and its session
        with open_session(Manifest.of([ShardRef(url)]), "ranges") as session:
            grant = _grant_without_bytes(session)
        # Whatever is read later is of this version.
        self._ref = ShardRef(url, grant["version"], grant["size_bytes"])
        if grant["type"] == "leased":  # the whole object is cached
            self._open_cached_file()

    def __repr__(self) -> str:
        return f"RawObject({redact(self._ref.url)!r}, cached_file={self._cached_file})"

    @property
    def name(self) -> str:
        """Path of the cached file, which ends with the object's own name."""
        return str(self._open_cached_file().name)

    def fileno(self) -> int:
        """Return the descriptor of the cached file."""
        return self._open_cached_file().fileno()

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer; return their number, which is 0 at the end."""
        with self._lock:
            self._check_open()
            # Before anything is read: an error must not lose bytes.
            if self._ranges is not None and self._ranges.is_whole:
                self._open_cached_file()
            if self._cached_file is not None:
                return self._cached_file.readinto(buffer) or 0
            _, read_ahead = self._open_ranges()
            target = memoryview(buffer).cast("B")
            data = read_ahead.read(self._position, self._position + len(target))
            target[: len(data)] = data
            self._position += len(data)
            return len(data)

    def readall(self) -> bytes:
        """Return all bytes from the position on."""
        with self._lock:
            self._check_open()
            # 1. All of the object is read: it is fetched as a whole, whose checksum is compared.
            if self._cached_file is not None or self._position == 0:
                return self._open_cached_file().readall()

            # 2. Only the end is read.
            ranges, _ = self._open_ranges()
            data = ranges.read(self._position, max(self._position, self._size_bytes))
            self._position += len(data)
            return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, and return it; arguments as for `io.IOBase.seek`."""
        with self._lock:
            self._check_open()
            if self._cached_file is not None:
                return self._cached_file.seek(offset, whence)
            bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}
            if whence not in bases or bases[whence] + offset < 0:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._position = bases[whence] + offset
            return self._position

    def close(self) -> None:
        """Close the file, and release the object in the cache."""
        with self._lock:
            super().close()
            self._opened.close()

    @property
    def _size_bytes(self) -> int:
        """Size of the object."""
        assert self._ref.size_bytes is not None
        return self._ref.size_bytes

    def _check_open(self) -> None:
        """Raise ValueError if this file is closed."""
        if self.closed:
            raise ValueError("I/O operation on closed file")

    def _open_ranges(self) -> tuple[RangeFile, ReadAhead]:
        """Return the object for reading ranges, with read-ahead and without; open it first."""
        if self._ranges is not None and self._read_ahead is not None:
            return self._ranges, self._read_ahead
        with ExitStack() as opened:
            session = opened.enter_context(self._open_session(Manifest.of([self._ref]), "ranges"))
            ranges = opened.enter_context(closing(RangeFile(session, position=0)))
            self._opened = opened.pop_all()

        def fetch(start: int, stop: int, ahead_to: int) -> bytes:
            """Fetch a range, and what `BufferedReader` reads after it to fill its buffer.

            By itself, that read would continue this one. The daemon would take the object for one
            that is read in order, and fetch many more bytes ahead.
            """
            return ranges.read(start, stop + _BUFFER_BYTES, ahead_to)

        self._ranges = ranges
        self._read_ahead = ReadAhead(DEFAULT_BLOCK_BYTES, fetch, self._size_bytes)
        return self._ranges, self._read_ahead

    def _open_cached_file(self) -> io.FileIO:
        """Return the cached file, at this file's position; fetch and open it first."""
        with self._lock:
            self._check_open()
            if self._cached_file is not None:
                return self._cached_file
            manifest = Manifest.of([self._ref])
            with ExitStack() as opened:
                session = opened.enter_context(self._open_session(manifest, "files"))
                # The object is the only one of the plan, so its position there is 0.
                held = opened.enter_context(closing(CachedFile(session, 0, named=True)))
                cached_file = opened.enter_context(io.FileIO(str(held.wait_whole())))
                cached_file.seek(self._position)
                self._opened.close()  # no more ranges are read
                self._opened = opened.pop_all()
            self._ranges = None
            self._read_ahead = None
            self._cached_file = cached_file
            return cached_file


def _grant_without_bytes(session: Session) -> Grant:
    """Return a grant of the object in a plan of ranges, for which no bytes are fetched.

    It has the object's version and size. It is "leased" if the whole object is cached.
    """
    # The object is the only one of the plan, so its position is 0.
    (lease,) = session.lease_ranges([(0, _BEYOND_END)], needed=True)
    return session.wait(lease)
