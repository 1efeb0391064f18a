"""A reader's progress in its share, and the number of samples and shards that it skipped."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from shardcache.errors import SampleError
from shardcache_client.handlers import Handler
from shardcache_client.position.state import Place

log = logging.getLogger("shardcache")


class StoppedError(Exception):
    """A handler has ended the epoch."""


class ReadingProgress(Protocol):
    """The interface by which reading moves a position on.

    Attributes:
        taken: number of samples passed.
    """

    taken: int

    def begin_step(self, step: int, skipped: int) -> None:
        """Note the start of a step, of which `skipped` samples were taken before."""

    def skip(self, exn: Exception) -> None:
        """Call the handler with an error. Raises what ends the epoch."""


@dataclass(slots=True, eq=False)
class ReaderPosition:
    """Progress within an epoch: the attributes of `Place`, and the following.

    Attributes:
        on_error: handler for each error of a sample or shard.
        skipped_samples: number of samples that were bad or could not be decoded.
        skipped_shards: number of shards that could not be read, wholly or from some sample on.
    """

    on_error: Handler
    time: int = 0
    taken: int = 0
    given: int = 0
    step: int = 0
    skipped_samples: int = 0
    skipped_shards: int = 0
    _before: int = 0  # number of samples taken before this step

    @classmethod
    def at(cls, place: Place, on_error: Handler) -> ReaderPosition:
        """Build the position of a reader that resumes from a place."""
        return cls(on_error, place.time, place.taken, place.given, place.step, _before=place.taken - place.nth)

    @property
    def place(self) -> Place:
        """Position after the last sample yielded."""
        return Place(self.time, self.taken, self.given, self.step, self.taken - self._before)

    def begin_step(self, step: int, skipped: int) -> None:
        """Note the start of a step, of which `skipped` samples were taken before."""
        self.step, self._before = step, self.taken - skipped

    def begin_again(self) -> None:
        """Note the start of the next share."""
        self.time, self.taken, self.step, self._before = self.time + 1, 0, 0, 0

    def skip(self, exn: Exception) -> None:
        """Call the handler with an error, and count the skipped sample or shard.

        Raises StoppedError if the handler ends the epoch, or what the handler raises.
        """
        if not self.on_error(exn):
            raise StoppedError
        if isinstance(exn, SampleError):
            self.skipped_samples += 1
        else:
            self.skipped_shards += 1

    def report(self, epoch: int, *, made_up: bool) -> None:
        """Log the numbers of skipped samples and shards, if any."""
        if self.skipped_shards or self.skipped_samples:
            log.warning(
                "epoch %d: skipped %d shards, and %d samples of other shards, as on_error decided%s",
                epoch,
                self.skipped_shards,
                self.skipped_samples,
                "; other samples were repeated in their place" if made_up else "",
            )
