"""Progress of a reader in its share, and of a rank in an iteration of its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardcache.errors import SampleError
from shardcache_client.handlers import Handler
from shardcache_client.position.state import Place, ReaderState

log = logging.getLogger("shardcache")


class StoppedError(Exception):
    """A handler has ended the epoch."""


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
    _before: int | None = None  # number of samples taken before this step, if steps count

    @classmethod
    def at(cls, place: Place, on_error: Handler) -> ReaderPosition:
        """Build the position of a reader that resumes from a place."""
        return cls(on_error, place.time, place.taken, place.given, place.step, _before=place.taken - place.nth)

    @property
    def place(self) -> Place:
        """Position after the last sample yielded."""
        nth = 0 if self._before is None else self.taken - self._before
        return Place(self.time, self.taken, self.given, self.step, nth)

    def begin_step(self, step: int, skipped: int) -> None:
        """Note the start of a step, of which `skipped` samples were taken before."""
        self.step, self._before = step, self.taken - skipped

    def begin_again(self) -> None:
        """Note the start of the next share."""
        self.time, self.taken, self.step, self._before = self.time + 1, 0, 0, None

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


class RankPosition:
    """The states of a rank's workers after the batches that the training loop has taken from them.

    Args:
        states: of all workers, at the start of the iteration.
        left: returns the number of samples that a worker has left after a state, if they are counted; at most so many
            with a filter.
        ends_together: returns True if all ranks end the epoch after the same number of batches.
        turn: number of the worker whose batch comes first.
        batch_size: size of the loader's batches.
        drop_last: True if the loader drops short batches.
        in_order: True if workers' batches come in turn, False if they come as they are ready.

    Attributes:
        epoch: the epoch that is being read.
    """

    def __init__(
        self,
        states: Sequence[ReaderState],
        left: Callable[[ReaderState], int],
        ends_together: Callable[[], bool],
        *,
        turn: int,
        batch_size: int,
        drop_last: bool,
        in_order: bool,
    ) -> None:
        self.epoch = states[0].epoch
        self._states = list(states)
        self._left = left
        self._ends_together = ends_together
        self._next_worker = turn
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._in_step = in_order or len(states) == 1
        self._ended = False

    def __repr__(self) -> str:
        return f"RankPosition(epoch={self.epoch}, next_worker={self._next_worker}, ended={self._ended})"

    def note(self, state: ReaderState) -> None:
        """Note the state of the worker that has made the batch just taken."""
        worker = state.reader % len(self._states)
        self._states[worker] = state
        self._next_worker = (worker + 1) % len(self._states)

    def end(self) -> None:
        """Note that there are no more batches."""
        self._ended = True

    def to_json(self) -> dict[str, Any]:
        """Return the states of all workers, and the worker whose turn is next, as a JSON object."""
        over = self.is_read and self._ends_together()
        states = [replace(state, over=over, in_step=self._in_step and state.in_step) for state in self._states]
        return {"workers": [state.to_json() for state in states], "turn": 0 if over else self._next_worker}

    @property
    def is_read(self) -> bool:
        """True if there are known to be no more batches."""
        return self._ended or (self._states[0].counted and not self.batches_left)

    @property
    def batches_left(self) -> int:
        """Number of batches that are left, if the samples are counted; at most so many with a filter."""
        left = map(self._left, self._states)
        return sum(each // self._batch_size if self._drop_last else -(-each // self._batch_size) for each in left)
