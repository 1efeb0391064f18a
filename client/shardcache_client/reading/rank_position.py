"""The position of one rank in an iteration, known from the states that its workers send along with their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardcache_client.position.state import Place, ReaderState
from shardcache_client.reading.stream import EpochStream


class RankPosition:
    """The states of a rank's workers after the batches that the training loop has taken from them.

    Args:
        streams: of all workers, at the start of the iteration.
        state_of: returns a state of a stream at a place.
        turn: number of the worker whose batch comes first.
        batch_size: size of the loader's batches.
        drop_last: True if the loader drops short batches.
        in_order: True if workers' batches come in turn, False if they come as they are ready.

    Attributes:
        epoch: the epoch that is being read.
    """

    def __init__(
        self,
        streams: Sequence[EpochStream],
        state_of: Callable[[EpochStream, Place], ReaderState],
        *,
        turn: int,
        batch_size: int,
        drop_last: bool,
        in_order: bool,
    ) -> None:
        self.epoch = streams[0].start.epoch
        self._streams = streams
        self._states = [state_of(stream, stream.reader_position.place) for stream in streams]
        self._next_worker = turn
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._in_order = in_order
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

    def states(self, ends_together: Callable[[EpochStream], bool]) -> dict[str, Any]:
        """Return the states of all workers, and the worker whose turn is next, as a JSON object.

        Args:
            ends_together: returns True if all ranks end the epoch after the same number of batches.
        """
        over = self.is_read and ends_together(self._streams[0])
        in_step = self._in_order or len(self._states) == 1
        states = [replace(state, over=over, in_step=in_step and state.in_step) for state in self._states]
        return {"workers": [state.to_json() for state in states], "turn": 0 if over else self._next_worker}

    @property
    def is_read(self) -> bool:
        """True if there are known to be no more batches."""
        return self._ended or (all(stream.counted for stream in self._streams) and not self.batches_left)

    @property
    def batches_left(self) -> int:
        """Number of batches that are left, if the samples are counted; at most so many with a filter."""
        samples = [stream.left_after(state.place) for stream, state in zip(self._streams, self._states, strict=True)]
        return sum(left // self._batch_size if self._drop_last else -(-left // self._batch_size) for left in samples)
