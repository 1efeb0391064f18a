"""One reader's epoch of batches by length, in rounds: one buffer per round, and an agreed number of batches for it.

Ranks cannot deadlock. Readers with the same worker id on all ranks agree, round by round, on the greatest number of
batches that any of them needs. Suppose that ranks train in step and all are stuck after the same number of batches. A
DataLoader takes batches from its workers in turn, and the numbers agreed on so far are the same everywhere, so every
rank waits for the same round of the same worker. All batches of that worker's earlier rounds have been taken, so each
of these readers has filled its buffer, which depends on no other rank, and has sent its number. Then they agree, and
are not stuck. The numbers of buffers may differ: a reader without samples keeps agreeing until none needs a batch.

The agreed numbers are determined by manifest, seed, epoch and topology, since a sample always has the same length. A
run resumed from a state therefore reproduces the batches at which it was interrupted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from shardcache_client.handlers import Handler
from shardcache_client.lengths.buckets import batches, fewest
from shardcache_client.lengths.gathering import BatchableDataset, Gatherer, SampleBuffer, State
from shardcache_client.order.permute import permutation
from shardcache_client.topology import Topology

log = logging.getLogger("shardcache")


class Agreeing(Protocol):
    """Interface for agreeing on one number per round, such as `agreement.Agreement`."""

    def greatest(self, name: str, value: int) -> int:
        """Return the greatest value that any rank passes under this name, once all have passed one."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Parameters of the batches; see `batch_by_length`."""

    max_tokens: int
    length: Callable[[Any], int]
    sort_buffer: int
    collate: Callable[[list[Any]], Any]
    on_error: Handler


class Rounds:
    """Pairs of a batch and the state after it. Iterable once.

    Args:
        loaded: the structure of states that the dataset was resumed from, or None.

    Attributes:
        state: the state before the first batch.

    Raises what the agreement raises, and ConfigError if this reader has no sample but others do.
    """

    def __init__(self, dataset: BatchableDataset, recipe: Recipe, agreement: Agreeing, loaded: Any = None) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._agreement = agreement
        self._reader = dataset.topology()
        self._gatherer = Gatherer(dataset, recipe.length, recipe.max_tokens, recipe.on_error)
        self._epoch = dataset.epoch  # definite, now that the dataset has begun the epoch
        state = find_state(loaded, self._reader, self._epoch)
        note = state["batch_by_length"] if state else {"round": 0, "given": 0}
        self._skip: int = note["given"]
        self._buffer = self._empty_buffer(note["round"])
        self._repeated = 0
        self.state = state or self._state(self._buffer)

    def __iter__(self) -> Iterator[tuple[Any, State]]:
        buffer, before = self._buffer, None
        self._gatherer.fill(buffer, self._recipe.sort_buffer)
        while count := self._agreed(buffer):
            self._repeated += max(0, count - len(buffer.samples))
            if not buffer.samples:
                buffer.borrow(before)
            following = self._empty_buffer(buffer.number + 1)
            yield from self._round(buffer, count, following)
            buffer, before = following, buffer
        self._say_what_was_odd()

    def _empty_buffer(self, number: int) -> SampleBuffer:
        return SampleBuffer(number, self._dataset.state_dict(), self._dataset.position)

    def _agreed(self, buffer: SampleBuffer) -> int:
        need = fewest(buffer.lengths, self._recipe.max_tokens)
        return self._agreement.greatest(f"epoch {self._epoch}, round {buffer.number}", need)

    def _round(self, buffer: SampleBuffer, count: int, following: SampleBuffer) -> Iterator[tuple[Any, State]]:
        made = batches(buffer.lengths, self._recipe.max_tokens, count)
        # The same on all ranks, so that they get batches of similar length at the same time.
        order = permutation(count, f"{self._dataset.seed}/{self._epoch}/{self._reader.worker}/{buffer.number}")
        for given, which in enumerate(order, 1):
            batch = buffer.take(made[which])
            if given > self._skip:
                yield (
                    self._recipe.collate(batch),
                    self._state(buffer, given) if given < count else self._state(following),
                )
            # As many as were yielded, so that no batch waits for a whole buffer, and memory never holds two.
            self._gatherer.fill(following, min(buffer.gone, self._recipe.sort_buffer))
        self._skip = 0

    def _state(self, buffer: SampleBuffer, given: int = 0) -> State:
        return state_of(self._reader, self._epoch, buffer, given)

    def _say_what_was_odd(self) -> None:
        if self._gatherer.refused:
            log.warning(
                "epoch %d: skipped %d samples longer than max_tokens, as on_error decided",
                self._epoch,
                self._gatherer.refused,
            )
        if self._repeated:
            log.warning(
                "epoch %d: repeated %d samples to make as many batches as other ranks", self._epoch, self._repeated
            )


def state_of(reader: Topology, epoch: int, buffer: SampleBuffer, given: int = 0) -> State:
    """Return the state of a reader that has yielded `given` batches of a buffer."""
    note = {"reader": list(astuple(reader)), "epoch": epoch, "round": buffer.number, "given": given}
    return {"batch_by_length": note, "dataset": buffer.start | {"beyond": buffer.beyond if given else ""}}


def find_state(states: Any, reader: Topology, epoch: int) -> State | None:
    """Find a reader's state in an epoch anywhere in a structure; return None if ranks or workers were others then.

    If it is missing, the state of the same worker of another rank serves as well, as ranks take their batches in step.
    """
    rank, *others = astuple(reader)
    alike = [
        state
        for state in _search(states)
        if state["batch_by_length"]["reader"][1:] == others and state["batch_by_length"]["epoch"] == epoch
    ]
    return next(
        (state for state in alike if state["batch_by_length"]["reader"][0] == rank), alike[0] if alike else None
    )


def _search(states: Any) -> Iterator[State]:
    if isinstance(states, dict) and "batch_by_length" in states:
        yield states
    elif isinstance(states, dict | list | tuple):
        for each in states.values() if isinstance(states, dict) else states:
            yield from _search(each)
