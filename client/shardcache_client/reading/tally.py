"""Where a reader is in its share, and what it had to leave out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shardcache.errors import SampleError
from shardcache_client.handlers import Handler
from shardcache_client.order.state import Place

log = logging.getLogger("shardcache")


class StoppedError(Exception):
    """A handler said that the epoch ends here."""


@dataclass(slots=True, eq=False)
class Tally:
    """Kept while an epoch is read. Attributes are those of `Place`.

    Attributes:
        on_error: decides about each error of a sample or a shard.
        skipped_samples: bad ones, and those that could not be decoded.
        skipped_shards: those of which the whole, or the rest, could not be read.
    """

    on_error: Handler
    time: int = 0
    taken: int = 0
    given: int = 0
    beat: int = 0
    skipped_samples: int = 0
    skipped_shards: int = 0
    _before: int = 0  # what was taken before this beat

    @classmethod
    def at(cls, place: Place, on_error: Handler) -> Tally:
        """Build to go on from a place."""
        return cls(on_error, place.time, place.taken, place.given, place.beat, _before=place.taken - place.nth)

    @property
    def place(self) -> Place:
        """Where the reader is: behind the sample that it gave last."""
        return Place(self.time, self.taken, self.given, self.beat, self.taken - self._before)

    def begin_beat(self, beat: int, skipped: int) -> None:
        """Note that a beat begins, of which so many samples were taken before."""
        self.beat, self._before = beat, self.taken - skipped

    def begin_again(self) -> None:
        """Note that the share is read once more."""
        self.time, self.taken, self.beat, self._before = self.time + 1, 0, 0, 0

    def skip(self, exn: Exception) -> None:
        """Ask the handler about an error, and count what is left out for it.

        Raises StoppedError, or what the handler raises.
        """
        if not self.on_error(exn):
            raise StoppedError
        if isinstance(exn, SampleError):
            self.skipped_samples += 1
        else:
            self.skipped_shards += 1

    def report(self, epoch: int, *, made_up: bool) -> None:
        """Say in the log what was left out, if anything was."""
        if self.skipped_shards or self.skipped_samples:
            log.warning(
                "epoch %d: skipped %d shards and %d samples of others, as on_error decided%s",
                epoch,
                self.skipped_shards,
                self.skipped_samples,
                "; other samples came once more in their place" if made_up else "",
            )
