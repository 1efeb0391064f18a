"""One shard of a plan, from its lease to its last sample, whatever becomes of file and daemon on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardcache.errors import (
    CacheDirError,
    CorruptShardError,
    CountMismatchError,
    OriginUnavailableError,
    SampleError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.protocol import Arriving, Leased
from shardcache_client.daemon.lender import Lender
from shardcache_client.daemon.session import Grant, Lease
from shardcache_client.reading.arriving import ArrivingShard
from shardcache_client.reading.cutting import Sample
from shardcache_client.reading.reader import ShardReader

if TYPE_CHECKING:
    from shardcache_client.sharing.handover import Handover

# A shard that was leased ahead may be let go for one that is needed sooner; that it happens again while the reader
# stands there is not to be expected, and a process that does not see the cache, or sees damage, will see it again,
# unless there is another way to the shard.
_TRIES = 5


class Passage:
    """Reads a shard on from the sample it has come to, each time from what the daemon grants: the beginning of an
    arriving file, the whole one, or the same of the next daemon.

    Every error says what had been given of the shard before.

    Args:
        lease: as the session gave it; from here on the passage's.
        count: how many samples the shard is said to have; None where nobody says so.
        span: which of them are read in their order, the end being None for all; no span where they are read by number.
        handover: through which samples may reach other processes without a copy.

    Attributes:
        number: of the sample that comes next.
    """

    def __init__(
        self,
        session: Lender,
        lease: Lease,
        *,
        count: int | None = None,
        span: tuple[int, int | None] | None = None,
        handover: Handover | None = None,
    ) -> None:
        self._session = session
        self._lease = lease
        self._count = count
        self._start, self._stop = span or (0, None)
        self._in_order = span is not None
        self._handover = handover
        self._shard: ShardReader | ArrivingShard | None = None
        self._version: str | None = None
        self.number = self._start
        self._bad = 0  # how many could not be given
        self._last_key = ""
        self._tried_again = False
        self._was_arriving = False

    def __repr__(self) -> str:
        return f"Passage(position={self._lease.position}, yielded={self._yielded}, {self._shard!r})"

    @property
    def _yielded(self) -> int:
        return self.number - self._start - self._bad

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
        """Yield the samples of the span that are still to come, in the order of the file, of an open passage.

        Raises SampleError in place of a bad sample; call again for those behind it. Any other error is the shard's.
        """
        with self._naming_what_was_given():
            while True:
                try:
                    yield from self._samples_here()
                except ShardcacheError as exn:
                    if not self._may_try_again(exn):
                        raise
                    self._ask_again()
                else:
                    if isinstance(self._shard, ShardReader) or self.number == self._stop:
                        return
                self._open()

    def cutter(self) -> Callable[[int], Sample]:
        """Return a function that gives any sample of an open passage by its number, or raises SampleError.

        The lease must have been asked for whole.
        """
        return self._whole.cutter()

    def __len__(self) -> int:
        """Return how many samples the shard has; of an open passage that was asked for whole."""
        return len(self._whole)

    @property
    def settled(self) -> bool:
        """Whether no other process has still to find the file of a sample that was given."""
        return not isinstance(self._shard, ShardReader) or self._shard.settled

    @property
    def _whole(self) -> ShardReader:
        assert isinstance(self._shard, ShardReader)
        return self._shard

    def _open(self) -> None:
        self._close_shard()
        try:
            self._shard = self._opened()
        except ShardcacheError as exn:
            if not self._may_try_again(exn):
                raise
            self._ask_again()
            self._shard = self._opened()

    def _may_try_again(self, exn: ShardcacheError) -> bool:
        """Tell whether to ask for the shard once more after an error, as the daemon tries once more; True only once.

        The shard's next version, or the next try, may be whole, which is of use as long as nothing was given of this
        one. A shard that merely did not come may be read on. Raising is the caller's: an error in a frame of its own
        traceback would keep the whole iteration, session included, until the garbage collector comes.
        """
        anew = isinstance(exn, ShardChangedError | CorruptShardError) and self.number == self._start
        late = isinstance(exn, OriginUnavailableError)
        if self._tried_again or not self._was_arriving or not (anew or late):
            return False
        self._tried_again = True
        return True

    def _samples_here(self) -> Iterator[Sample]:
        assert self._shard is not None
        try:
            for sample in self._shard.samples(self.number, self._stop):
                self.number += 1
                self._last_key = sample["__key__"]
                yield sample
        except SampleError:
            self.number += 1
            self._bad += 1
            raise

    def _opened(self) -> ShardReader | ArrivingShard:
        tries_left = _TRIES
        while True:
            grant = self._session.wait(self._lease)
            self._check_version(grant)
            try:
                return self._map(grant)
            except (CacheDirError, CorruptShardError):
                tries_left -= 1
                if not tries_left:
                    raise
            if grant["type"] == "arriving":  # whole by now, or given up: the daemon knows which
                self._session.more(self._lease, grant["size_bytes"])
            else:
                self._ask_again()

    def _ask_again(self) -> None:
        self._session.release(self._lease, read=False)
        self._lease = self._session.lease(self._lease.position, partial=self._lease.partial)

    def _map(self, grant: Grant) -> ShardReader | ArrivingShard:
        if grant["type"] == "arriving":
            self._was_arriving = True
            last = None if self._count is None else self._count - 1
            return ArrivingShard(cast(Arriving, grant), self._more, last)
        leased = cast(Leased, grant)
        if self._count is not None and self._count != leased["samples"]:
            raise CountMismatchError(
                f"it holds {leased['samples']} samples, and the manifest says {self._count}", url=leased["url"]
            )
        paths = Path(leased["path"]), Path(leased["index_path"])
        return ShardReader(*paths, leased["url"], in_order=self._in_order, handover=self._handover)

    def _more(self, beyond: int) -> Arriving | None:
        grant = self._session.more(self._lease, beyond)
        return cast(Arriving, grant) if grant is not None and grant["type"] == "arriving" else None

    def _check_version(self, grant: Grant) -> None:
        """Begin anew with another version, unless some of this one was given."""
        if self._version not in (None, grant["version"]):
            if self._yielded:
                raise ShardChangedError("the shard was replaced in the store while it was read", url=grant["url"])
            self.number, self._bad = self._start, 0
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
