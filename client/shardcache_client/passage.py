"""One shard of a plan, from its lease to its last sample, whatever becomes of file and daemon on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from shardcache.errors import (
    CorruptShardError,
    OriginUnavailableError,
    SampleError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.protocol import Arriving, Leased
from shardcache_client.arriving import ArrivingShard
from shardcache_client.cutting import Sample
from shardcache_client.reader import ShardGoneError, ShardReader
from shardcache_client.session import Grant, Lease, Session

# A shard that was leased ahead may be let go for one that is needed sooner; that it happens again while the reader
# stands there is not to be expected, and a process that does not see the cache will never see it.
_TRIES = 5


class Passage:
    """Reads a shard on from the sample it has come to, each time from what the daemon grants: the beginning of an
    arriving file, the whole one, or the same of the next daemon.

    Every error says what had been given of the shard before.

    Args:
        lease: as the session gave it; from here on the passage's.
    """

    def __init__(self, session: Session, lease: Lease) -> None:
        self._session = session
        self._lease = lease
        self._shard: ShardReader | ArrivingShard | None = None
        self._version: str | None = None
        self._number = 0  # of the sample that comes next
        self._bad = 0  # how many could not be given
        self._last_key = ""
        self._tried_again = False
        self._was_arriving = False

    def __repr__(self) -> str:
        return f"Passage(position={self._lease.position}, yielded={self._yielded}, {self._shard!r})"

    @property
    def _yielded(self) -> int:
        return self._number - self._bad

    def open(self) -> None:
        """Wait for the shard, or its beginning, and map it.

        Raises what `Session.wait` and `ShardReader` raise, and ShardChangedError when the store has replaced a shard of
        which some samples were given.
        """
        with self._naming_what_was_given():
            self._open()

    def close(self) -> None:
        """Give shard and lease back."""
        self._close_shard()
        self._session.release(self._lease)

    def samples(self) -> Iterator[Sample]:
        """Yield the samples that are still to come, of an open passage.

        Raises SampleError in place of a bad sample; call again for those behind it. Any other error is the shard's.
        """
        with self._naming_what_was_given():
            while True:
                try:
                    yield from self._samples_here()
                except ShardcacheError as exn:
                    self._try_again(exn)
                else:
                    if isinstance(self._shard, ShardReader):
                        return
                self._open()

    def _open(self) -> None:
        self._close_shard()
        try:
            self._shard = self._opened()
        except ShardcacheError as exn:
            self._try_again(exn)
            self._shard = self._opened()

    def _try_again(self, exn: ShardcacheError) -> None:
        """Ask for the shard once more where that may help, as the daemon tries once more; else raise the error.

        Its next version, or the next try, may be whole, which is of use as long as nothing was given of this one. What
        merely did not come may be gone on with.
        """
        anew = isinstance(exn, ShardChangedError | CorruptShardError) and not self._number
        late = isinstance(exn, OriginUnavailableError)
        if self._tried_again or not self._was_arriving or not (anew or late):
            raise exn
        self._tried_again = True
        self._ask_again()

    def _samples_here(self) -> Iterator[Sample]:
        assert self._shard is not None
        try:
            for sample in self._shard.samples(self._number):
                self._number += 1
                self._last_key = sample["__key__"]
                yield sample
        except SampleError:
            self._number += 1
            self._bad += 1
            raise

    def _opened(self) -> ShardReader | ArrivingShard:
        tries_left = _TRIES
        while True:
            grant = self._session.wait(self._lease)
            self._check_version(grant)
            try:
                return self._map(grant)
            except ShardGoneError:
                tries_left -= 1
                if not tries_left:
                    raise
            if grant["type"] == "arriving":  # whole by now, or given up: the daemon knows which
                self._session.more(self._lease, grant["size_bytes"])
            else:
                self._ask_again()

    def _ask_again(self) -> None:
        self._session.release(self._lease)
        self._lease = self._session.lease(self._lease.position)

    def _map(self, grant: Grant) -> ShardReader | ArrivingShard:
        if grant["type"] == "arriving":
            self._was_arriving = True
            return ArrivingShard(cast(Arriving, grant), self._more)
        leased = cast(Leased, grant)
        return ShardReader(Path(leased["path"]), Path(leased["index_path"]), leased["url"])

    def _more(self, beyond: int) -> Arriving | None:
        grant = self._session.more(self._lease, beyond)
        return cast(Arriving, grant) if grant is not None and grant["type"] == "arriving" else None

    def _check_version(self, grant: Grant) -> None:
        """Begin anew with another version, unless some of this one was given."""
        if self._version not in (None, grant["version"]):
            if self._yielded:
                raise ShardChangedError("the shard was replaced in the store while it was read", url=grant["url"])
            self._number = self._bad = 0
        self._version = grant["version"]

    @contextmanager
    def _naming_what_was_given(self) -> Iterator[None]:
        try:
            yield
        except SampleError:
            raise
        except ShardcacheError as exn:
            if self._yielded:
                exn.yielded = self._yielded
                exn.message += (
                    f"; the first {self._yielded} samples of it, up to key {self._last_key!r}, had been given already"
                )
            raise

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None
