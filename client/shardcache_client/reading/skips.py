"""Samples that a reader could not give in an epoch: handler and numbers of errors, and when nothing is left to try."""

from dataclasses import dataclass

from shardcache.errors import SampleError, ShardError
from shardcache_client.decoding import Dropped
from shardcache_client.handlers import Handler
from shardcache_client.reading.leased_shard import LeftOutError


class StoppedError(Exception):
    """A handler has ended the epoch."""


@dataclass(slots=True)
class Skipped:
    """Handler of errors; numbers of bad samples, and of shards that could not be read, wholly or from a sample on.

    Those of the reader's own share are counted: replacements come from the shares of others, who count theirs, or once
    more from its own.
    """

    on_error: Handler
    reader: str  # rank and worker, for messages
    epoch: int
    pass_places: int | None  # number of consecutive places that hold every sample, if it is known
    samples: int = 0
    shards: int = 0
    counts: bool = True  # False while replacements are read
    first: str = ""  # the first error, without its remedy; as text, as its traceback would keep the session
    barren: int = 0  # number of places that gave no sample since the last one that did
    barren_since: int = -1  # number of samples given before these

    def skip(self, exn: Exception) -> None:
        """Call the handler, and count the sample or shard. Raises StoppedError if the handler ends the epoch."""
        if not (isinstance(exn, LeftOutError) or self.on_error(exn)):
            raise StoppedError
        if not self.first:
            self.first = str(exn).partition("\n")[0] or repr(exn)
        if isinstance(exn, SampleError):
            self.samples += self.counts
        else:
            self.shards += self.counts

    def drop(self, why: Dropped) -> None:
        """Count a sample that the pipeline has left out, unless a filter did."""
        self.samples += self.counts and why is Dropped.INCOMPLETE

    def note_barren(self, given: int) -> None:
        """Note a place without a sample, after so many samples given.

        Raises ShardError after a pass over the data that has only such places.
        """
        if self.barren_since != given:
            self.barren_since = given
            self.barren = 0
        self.barren += 1
        if self.barren == self.pass_places:
            raise self.unreadable()

    def unreadable(self) -> ShardError:
        """Return the error of a reader that has tried all samples since the last one that it could give."""
        if self.first:
            cause = f"the first error that on_error skipped was: {self.first}"
            remedy = "see the errors that on_error skipped"
        else:
            cause = "the filter left out all that it tried"
            remedy = "see what the filter returns for a sample of the dataset"
        return ShardError(
            f"{self.reader} cannot read any sample in epoch {self.epoch}, neither of its own share nor of others' "
            f"({self.barren} tried); {cause}",
            remedy=remedy,
        )
