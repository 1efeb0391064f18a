"""Makes batches from the samples that were read at their places.

Samples are decoded, bad samples are replaced, and the rest is collated.

- A place is the number of a sample in the reader's epoch.
- A part is a batch, or a chunk of samples for a stage.
- An item is what a sample has become after decoding and the user's functions.
- A bad sample is one that cannot be read or decoded. The handler, `on_error`, decides whether the
  epoch goes on without it. A substitute is a good sample that takes its place.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from shardcache.shared.exceptions import (
    MissingMemberError,
    SampleError,
    ShardcacheError,
    ShardError,
)
from shardcache_client.handlers import Handler
from shardcache_client.order.uncounted import StepPlace
from shardcache_client.reading.epochs.epoch_plans import ReadResult
from shardcache_client.reading.epochs.epoch_times import BatchTimes
from shardcache_client.reading.leased.joined_samples import LeftOutError
from shardcache_client.stages.item_stage import SILENT_ENDS, Dropped
from shardcache_client.stages.pipeline import Pipeline
from shardcache_client.stages.stage import Placed

Collate = Callable[[Any], Any]
"""Makes a batch of a list of items, or of one item by itself."""

# Stands for an item that cannot be made, or was dropped by a filter.
_NOTHING = object()


class RawPart(NamedTuple):
    """Results of reading the places of a part.

    Attributes:
        first: the first place.
        reads: for each place, a sample or the error of reading it.
        reading_s: seconds that reading has taken.
        waited_s: seconds of `reading_s` that were spent waiting for shards.
        steps: steps of uncounted shards, from the step with the first place on; empty if samples
            are counted.
        is_last: True if the epoch has no place after these.
    """

    first: int
    reads: Sequence[ReadResult]
    reading_s: float = 0.0
    waited_s: float = 0.0
    steps: tuple[StepPlace, ...] = ()
    is_last: bool = False


class MadePart(NamedTuple):
    """A part, and counts of the samples that it lacks.

    Attributes:
        content: the batch that `collate` has returned, or None for a batch without samples; or the
            `Chunk`.
        samples: number of samples in the part.
        is_last: True if a handler has ended the epoch with this part, or if reading has shown that
            no sample comes after it. False for the last of a known number of parts.
        skipped: number of samples that were skipped at the part's places.
        lost: urls of the shards that could not be read at the part's places.
        times: times that the steps of making the part have taken.
    """

    content: Any
    samples: int
    is_last: bool
    skipped: int
    lost: frozenset[str]
    times: BatchTimes


class StoppedError(Exception):
    """A handler has ended the epoch."""


@dataclass(slots=True)
class Skips:
    """Passes one epoch's errors to the user's handler. Any thread.

    The handler gets each error of a sample, but only one error for each shard that cannot be read.

    Attributes:
        on_error: the handler, which returns True to skip, and False to end the epoch.
        first_error: text of the first error that was skipped, without its remedy; "" if there was
            none. The error itself is not kept, since its traceback would keep the session.
    """

    on_error: Handler
    first_error: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lost: set[str] = field(default_factory=set)  # urls of shards whose error the handler has got

    def handle(self, exn: Exception) -> None:
        """Have the handler decide about an error, and return if it skips.

        Raises what the handler raises, or StoppedError if it ends the epoch.
        """
        # The dataset has missing='skip', so a sample without its partner is no error.
        if isinstance(exn, LeftOutError):
            return
        with self._lock:
            is_of_shard = not isinstance(exn, SampleError)
            if is_of_shard:
                url = url_of(exn)
                if url in self._lost:
                    return
                self._lost.add(url)

            if not self.on_error(exn):
                raise StoppedError
            if not self.first_error:
                message, _, _ = str(exn).partition("\n")
                self.first_error = message or repr(exn)


def url_of(exn: Exception) -> str:
    """Return the url of the shard that an error concerns; the error's text if it has no url."""
    if isinstance(exn, ShardcacheError) and exn.url:
        return exn.url
    return str(exn)


@dataclass(frozen=True, slots=True)
class ItemMaker:
    """Makes the items at the places of one epoch. Any thread.

    A bad sample that the handler skips is replaced by a substitute, so that the batches keep their
    size, and ranks their number of batches. The substitute depends on the place alone: so a batch
    is the same in whichever thread or process it is made.

    Attributes:
        pipeline: decodes samples and applies the user's functions.
        skips: decides about errors.
        substitutes: returns, for the bad sample at a place, the results of reading one substitute
            after another until every sample has been tried. None to leave bad samples out; always
            None if the pipeline has filters. It may be called by several threads at once.
        rank: number of the rank, for messages.
        epoch: number of the epoch, for messages.
    """

    pipeline: Pipeline
    skips: Skips
    substitutes: Callable[[int], Iterator[ReadResult]] | None
    rank: int
    epoch: int

    def items(self, first: int, reads: Iterable[ReadResult], bad: BadCounts) -> Iterator[Any]:
        """Yield the item of each place, or a substitute for it.

        Raises what the handler raises, StoppedError if the handler ends the epoch, and ShardError
        if no place has a good sample.

        Args:
            first: number of the first place.
            reads: results of reading the places, one after another.
            bad: counts the bad places among these.
        """
        # This loop runs for each sample, so an empty pipeline is not called.
        pipeline = self.pipeline or None
        item: Any
        for place, read in enumerate(reads, first):
            if isinstance(read, Exception):
                self._handle(read, bad)
                item = _NOTHING
            elif pipeline is None:
                item = read
            else:
                try:
                    item = pipeline(read)
                except SampleError as exn:
                    self._handle(exn, bad)
                    item = _NOTHING
                if item.__class__ is Dropped:
                    bad.note_dropped(item)
                    item = _NOTHING

            if item is not _NOTHING:
                yield item
            elif self.substitutes is not None:
                yield self._substitute(self.substitutes(place))

    def placed_items(
        self, first: int, reads: Iterable[ReadResult], bad: BadCounts
    ) -> Iterator[Placed]:
        """Yield the items with their places, without substitutes. See `items`."""
        # Each place before an item has either yielded an item or is counted in `bad`.
        for yielded, item in enumerate(self.items(first, reads, bad)):
            yield Placed(first + yielded + bad.places, item)

    def _handle(self, error: Exception, bad: BadCounts) -> None:
        """Count a bad place and have the handler decide about its error."""
        bad.note(error)
        self.skips.handle(error)

    def _substitute(self, reads: Iterator[ReadResult]) -> Any:
        """Return the first item that can be made of some substitutes. Raises ShardError."""
        # The handler is not called for errors of substitutes. Each substitute also has a place of
        # its own in the epoch, and its error is reported with the batch at that place.
        tried = 0
        for read in reads:
            tried += 1
            item = self._item_of(read)
            if item is not _NOTHING:
                return item
        raise no_good_sample(self.rank, self.epoch, tried, self.skips.first_error)

    def _item_of(self, read: ReadResult) -> Any:
        """Return the item of a sample, or `_NOTHING` if it cannot be made."""
        if isinstance(read, Exception):
            return _NOTHING
        if not self.pipeline:
            return read
        try:
            item = self.pipeline(read)
        except SampleError:
            return _NOTHING
        if item.__class__ is Dropped:
            return _NOTHING
        return item


def no_good_sample(
    rank: int, epoch: int, tried: int, first_error: str, *, is_filtered: bool = False
) -> ShardError:
    """Return the error for a rank that has found no good sample.

    Args:
        rank: number of the rank.
        epoch: number of the epoch.
        tried: number of places that the rank has tried since the last good sample.
        first_error: text of the first error that `on_error` skipped; empty if there was none.
        is_filtered: True if a filter may have left samples out.
    """
    remedy = "see the errors that on_error skipped"
    if first_error:
        cause = f"the first error that on_error skipped was: {first_error}"
    elif is_filtered:
        cause = "the filter left out all that it tried"
        remedy = "see what the filter returns for a sample of the dataset"
    else:
        cause = "the samples lack members that missing='skip' concerns"
    return ShardError(
        f"rank {rank} cannot read any sample in epoch {epoch} ({tried} tried); {cause}",
        remedy=remedy,
    )


@dataclass(slots=True)
class BadCounts:
    """Counts of bad samples, and of places that do not yield their own sample.

    Attributes:
        places: number of places whose own sample was left out or replaced: because it was bad, or
            because a filter rejected it.
        samples: number of bad samples of shards that can be read.
        lost: urls of shards that cannot be read.
    """

    places: int = 0
    samples: int = 0
    lost: set[str] = field(default_factory=set)

    def note(self, error: Exception) -> None:
        """Count a place whose sample, or its shard, has an error."""
        self.places += 1
        if isinstance(error, SampleError):
            self.samples += 1
        else:
            self.lost.add(url_of(error))

    def note_dropped(self, reason: Dropped) -> None:
        """Count a place whose sample the pipeline has dropped."""
        self.places += 1
        if reason is Dropped.INCOMPLETE:
            self.samples += 1


class Maker(ABC):
    """Makes the parts of one epoch: batches, or chunks of samples for a stage. Any thread."""

    def make(self, raw: RawPart) -> MadePart:
        """Return the part made of `raw`. Raises what `ItemMaker.items` and `gather` raise."""
        begun_s = monotonic()
        items: list[Any] = []
        bad = BadCounts()
        is_last = raw.is_last
        try:
            # If a handler ends the epoch, the items that came before stay in the list.
            items.extend(self.items_of(raw, bad))
        except StoppedError:
            is_last = True
        decoded_s = monotonic()
        content = self.gather(items, raw)
        ended_s = monotonic()
        times = BatchTimes(
            samples=len(items),
            # The time of making the part includes that of reading, which came first.
            begun_s=begun_s - raw.reading_s,
            ended_s=ended_s,
            waited_s=raw.waited_s,
            decoding_s=decoded_s - begun_s,
            collating_s=ended_s - decoded_s,
        )
        return MadePart(
            content,
            samples=len(items),
            is_last=is_last,
            skipped=bad.samples,
            lost=frozenset(bad.lost),
            times=times,
        )

    @abstractmethod
    def items_of(self, raw: RawPart, bad: BadCounts) -> Iterator[Any]:
        """Yield the items of a part, and count its bad places in `bad`."""

    @abstractmethod
    def gather(self, items: list[Any], raw: RawPart) -> Any:
        """Return the batch or the chunk that consists of these items.

        Args:
            items: the items that could be made of `raw`.
            raw: the results of reading the part's places.
        """


@dataclass(frozen=True, slots=True)
class BatchMaker(Maker):
    """Makes the batches of one epoch. Any thread.

    Attributes:
        item_maker: makes the items.
        collate: makes a batch of a list of items.
        size: number of samples in a batch; None to pass each item to `collate` by itself, without
            a list.
    """

    item_maker: ItemMaker
    collate: Collate
    size: int | None

    def items_of(self, raw: RawPart, bad: BadCounts) -> Iterator[Any]:
        """Yield the items of a batch, with substitutes for items that cannot be made."""
        return self.item_maker.items(raw.first, raw.reads, bad)

    def gather(self, items: list[Any], raw: RawPart) -> Any:
        """Return the batch that `collate` makes of the items; None if there are no items."""
        if not items:
            return None
        if self.size is None:
            return collated(self.collate, items[0])
        return collated(self.collate, items)


def collated(collate: Collate, samples: Any) -> Any:
    """Return the batch that a collate function makes of samples.

    Raises MissingMemberError in place of a KeyError for a member that some samples lack.
    """
    try:
        return collate(samples)
    except KeyError as exn:
        missing_member = _missing_member(samples, exn)
        if missing_member is None:
            raise
        raise missing_member from None
    except SILENT_ENDS as exn:  # any of these would silently end the epoch
        raise RuntimeError(f"collate_fn raised {type(exn).__name__}") from exn


def _missing_member(samples: Any, exn: KeyError) -> MissingMemberError | None:
    """Return the error that names the first sample without the key; None if all have it."""
    if not isinstance(samples, Sequence) or not exn.args:
        return None
    key = exn.args[0]
    for sample in samples:
        is_sample = isinstance(sample, Mapping) and "__key__" in sample
        if is_sample and key not in sample:
            return MissingMemberError.of(str(key), sample, is_named=False)
    return None
