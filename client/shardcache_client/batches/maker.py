"""Makes a batch of what was read at its places: decodes the samples, replaces those that cannot be, and collates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardcache.errors import SampleError, ShardError
from shardcache_client.decoding import Dropped, Pipeline
from shardcache_client.handlers import Handler
from shardcache_client.order.rank_epoch import substitutes
from shardcache_client.reading.place_reader import Read

Collate = Callable[[Any], Any]


class RawBatch(NamedTuple):
    """Results of reading the places of a batch."""

    number: int
    first: int  # number of the first place
    reads: Sequence[Read]


class MadeBatch(NamedTuple):
    """A batch, and whether the epoch ends with it."""

    batch: Any  # None if it has no samples, as the epoch ended before
    is_last: bool


class _StoppedError(Exception):
    """A handler has ended the epoch."""


@dataclass(slots=True)
class Skips:
    """The handler of one epoch's errors, and the numbers of places and shards that it has skipped. Any thread."""

    on_error: Handler
    samples: int = 0
    shards: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _of_shards: set[Exception] = field(default_factory=set)  # those that the handler has been called with

    def skip(self, exn: Exception) -> None:
        """Have the handler decide about an error, once for each shard. Raises what it raises, or _StoppedError."""
        with self._lock:
            if isinstance(exn, SampleError):
                self.samples += 1
            elif exn in self._of_shards:
                return
            else:
                self._of_shards.add(exn)
                self.shards += 1
            if not self.on_error(exn):
                raise _StoppedError

    def skip_incomplete(self) -> None:
        """Count a sample without a member that `missing="skip"` concerns."""
        with self._lock:
            self.samples += 1


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes the batches of one epoch. Any thread.

    The place of a sample that cannot be read or decoded, and that the handler skips, goes to a substitute, so that the
    batches keep their size, and ranks their number of batches. Which one it is depends on the place alone: whoever
    makes a batch makes the same.

    Attributes:
        pipeline: without filters.
        collate: makes a batch of a list of items; or None, to return the only item.
        places: number of places of the rank's epoch.
        read_again: returns what is read at any place. It may be called by several threads at once.
    """

    pipeline: Pipeline
    collate: Collate
    places: int
    skips: Skips
    read_again: Callable[[int], Read]

    def make(self, raw: RawBatch) -> MadeBatch:
        """Return a batch. Raises what the handler or `collate` raises, and ShardError if no place has a good sample."""
        items: list[Any] = []
        try:
            for place, read in enumerate(raw.reads, raw.first):
                items.append(self._item(place, read))
        except _StoppedError:
            return MadeBatch(self.collate(items) if items else None, is_last=True)
        return MadeBatch(self.collate(items), is_last=False)

    def _item(self, place: int, read: Read) -> Any:
        item = self._decoded(read)
        if not isinstance(item, _Bad):
            return item
        if item.error is None:
            self.skips.skip_incomplete()
        else:
            self.skips.skip(item.error)
        return self._substitute(place, item)

    def _substitute(self, place: int, bad: _Bad) -> Any:
        # Errors at other places concern the batches of those: the handler has been, or will be, called for them there.
        for other in substitutes(place, self.places):
            item = self._decoded(self.read_again(other))
            if not isinstance(item, _Bad):
                return item
        raise ShardError(
            f"none of the {self.places} samples of this rank's epoch can be read",
            remedy="see the errors that on_error skipped",
        ) from bad.error

    def _decoded(self, read: Read) -> Any:
        if isinstance(read, Exception):
            return _Bad(read)
        if not self.pipeline:
            return read
        try:
            item = self.pipeline(read)
        except SampleError as exn:
            return _Bad(exn)
        return _Bad(None) if item.__class__ is Dropped else item


@dataclass(frozen=True, slots=True)
class _Bad:
    """Stands for an item that is missing, because of an error or of a member that the sample lacks."""

    error: Exception | None
