"""`batch_by_length`: batches of samples of similar length, for speech and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from shardcache_client.arguments import FUNCTION, SECONDS, Accepts, checked, whole
from shardcache_client.handlers import ANY_HANDLER, Handler, handler_of, reraise
from shardcache_client.lengths.gathering import BatchableDataset, SampleBuffer, State
from shardcache_client.lengths.rounds import Agreeing, Recipe, Rounds, find_state, state_of
from shardcache_client.ranks.agreement import Agreement
from shardcache_client.ranks.distributed import MeetingPlace
from shardcache_client.topology import Ranks, Topology

_made: Counter[str] = Counter()


@checked(
    max_tokens=whole(1),
    length=FUNCTION,
    sort_buffer=whole(1),
    collate=FUNCTION,
    on_error=Accepts(ANY_HANDLER, handler_of),
    timeout_s=SECONDS,
)
def batch_by_length(
    dataset: BatchableDataset,
    max_tokens: int,
    length: Callable[[Any], int],
    *,
    sort_buffer: int = 1_000,
    collate: Callable[[list[Any]], Any] = list,
    on_error: Handler | str = reraise,
    timeout_s: float = 300.0,
) -> LengthBatches:
    """Batch samples of similar length: little padding, and no batch too large for the accelerator.

        ds = ShardDataset(urls, shuffle=True, decode=tokenize)
        loader = DataLoader(batch_by_length(ds, 16_000, len, collate=pad), batch_size=None, num_workers=8)

    Each worker reads `sort_buffer` samples at a time, sorts them, and cuts them into as few batches as `max_tokens`
    allows, or a few more if another rank needs more: every rank yields the same number of batches, and those of one
    step have similar lengths. The batches of a buffer come in an order shuffled by seed and epoch.

    Each sample comes once, with one exception: if a rank has fewer samples in a buffer than batches to make, the
    shortest is repeated. This happens only if it reads fewer samples than another rank, or many are too long.

    Args:
        dataset: a `ShardDataset`, or any dataset that implements `gathering.Source`.
        max_tokens: maximum padded size of a batch: number of samples times length of the longest, in any unit.
        length: returns a sample's length in that unit, always the same for the same sample; random changes of length
            belong in `collate`. A length below 1 counts as 1.
        sort_buffer: number of samples that each worker keeps in memory. Larger buffers mean less padding.
        collate: makes a batch from a list of samples. Default: the list itself.
        on_error: called with the SampleError of a sample longer than `max_tokens`. See `handlers`.
        timeout_s: how long a rank waits for the others to fill their buffers.

    Raises:
        ConfigError: an argument is invalid; or, when iterating, the ranks share no key-value store over which to
            agree, or one of them has no samples at all.
        RankTimeoutError, RanksError: a rank does not answer.
    """
    kind = f"{dataset.seed}/{max_tokens}/{sort_buffer}"
    _made[kind] += 1
    # The same name on all ranks, as they create these objects in the same order.
    agreements = Agreements(f"batches/{kind}/{_made[kind]}", timeout_s, MeetingPlace())
    return LengthBatches(dataset, Recipe(max_tokens, length, sort_buffer, collate, handler_of(on_error)), agreements)


@dataclass(frozen=True, slots=True)
class Agreements:
    """Factory of agreements between ranks over torch.distributed's key-value store. Can be pickled for workers."""

    name: str
    timeout_s: float
    place: MeetingPlace

    def __call__(self, reader: Topology) -> Agreement:
        """Return the agreement of a reader with the same worker of all other ranks, for one iteration."""
        channel = f"{self.name}/{reader.worker}of{reader.workers}"
        return Agreement(channel, Ranks(reader.rank, reader.world_size), self.timeout_s, self.place)


class LengthBatches(IterableDataset[Any]):
    """The batches of `batch_by_length`, for use with `DataLoader(..., batch_size=None)`."""

    def __init__(self, dataset: BatchableDataset, recipe: Recipe, agreements: Callable[[Topology], Agreeing]) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._agreements = agreements
        self._loaded: Any = None
        self._state: State | None = None

    def __repr__(self) -> str:
        return f"LengthBatches({self._dataset!r}, max_tokens={self._recipe.max_tokens})"

    def __len__(self) -> int:
        """Raise TypeError: the number of batches depends on lengths that have not been read yet."""
        raise TypeError("the number of batches by length is not known before the samples have been read")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads, including those in running DataLoader workers."""
        self._dataset.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return the position after the last batch: a few numbers, and no samples.

        It holds the dataset's state at the start of the current buffer, the number of batches yielded from it, and, as
        "beyond" in the dataset's state, one bit per sample of the buffer, set if the sample was in them.
        """
        if self._state is not None:
            return self._state
        reader, epoch = self._dataset.topology(), self._dataset.epoch
        start = SampleBuffer(0, self._dataset.state_dict(), self._dataset.position)
        return find_state(self._loaded, reader, epoch) or state_of(reader, epoch, start)

    def load_state_dict(self, state: Any) -> None:
        """Resume the next iteration from a state, or any structure that contains states, as a StatefulDataLoader's.

        The same ranks and workers read their buffers again and continue with exactly the next batch. With other ranks
        or workers, the states of all ranks resume with exactly those samples that were in no batch yet; the state of
        one rank makes them re-read the other ranks' current buffers from the start, so at most `sort_buffer` samples
        per worker come twice, and none is lost.
        """
        self._loaded, self._state = state, None
        self._dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator, as StatefulDataLoader requests the state between this call and the first batch.
        agreement = self._agreements(self._dataset.topology())
        rounds = Rounds(self._dataset, self._recipe, agreement, self._loaded)
        self._state = rounds.state
        return self._follow(rounds)

    def _follow(self, rounds: Rounds) -> Iterator[Any]:
        for batch, self._state in rounds:
            yield batch
