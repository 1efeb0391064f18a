"""`batch_by_length`: batches of samples of like length, for speech and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from shardcache.errors import ConfigError
from shardcache_client.handlers import Handler, reraise
from shardcache_client.lengths.gathering import Buffer, Source, State
from shardcache_client.lengths.rounds import Agreeing, Recipe, Rounds, find_state, state_of
from shardcache_client.ranks.agreement import Agreement
from shardcache_client.ranks.distributed import MeetingPlace
from shardcache_client.topology import Ranks, Topology

_made: Counter[str] = Counter()


def batch_by_length(
    dataset: Source,
    max_tokens: int,
    length: Callable[[Any], int],
    *,
    sort_buffer: int = 1_000,
    collate: Callable[[list[Any]], Any] = list,
    on_error: Handler = reraise,
    timeout_s: float = 300.0,
) -> LengthBatches:
    """Batch samples of like length, so that little is padding, and no batch is too large for the accelerator.

        ds = ShardDataset(urls, shuffle=True, decode=tokenize)
        loader = DataLoader(batch_by_length(ds, 16_000, len, collate=pad), batch_size=None, num_workers=8)

    Samples are gathered `sort_buffer` at a time, sorted, and cut into as few batches as `max_tokens` allows, or a few
    more where another rank needs more: every rank gives the same number of batches, those of one step alike in length.
    The batches of a buffer come in an order shuffled by the seed and the epoch.

    Each sample comes once. Only where a rank has fewer samples in a buffer than batches to make of it, its shortest is
    given again; that takes a rank that reads fewer samples than another, or has many that are too long.

    Args:
        dataset: a `ShardDataset`, or what does all that `gathering.Source` names.
        max_tokens: the greatest padded size of a batch: its samples times the longest of them, in any unit.
        length: of a sample, in that unit, and always the same for the same sample; what changes lengths at random
            belongs into `collate`. A length below 1 counts as 1.
        sort_buffer: how many samples each worker keeps in memory. The more, the less padding.
        collate: makes the batch of a list of samples. Default: the list itself.
        on_error: called with the SampleError of a sample longer than `max_tokens`. See `handlers`.
        timeout_s: how long a rank waits for the others to have read their buffers.

    Raises:
        ConfigError: an argument makes no sense; or, when iterating, the ranks share no key-value store by which to
            agree, or one of them has no samples at all.
        RankTimeoutError, RanksError: a rank does not answer.
    """
    if max_tokens < 1 or sort_buffer < 1:
        raise ConfigError(f"max_tokens is {max_tokens} and sort_buffer is {sort_buffer}", remedy="both count from 1")
    kind = f"{dataset.seed}/{max_tokens}/{sort_buffer}"
    _made[kind] += 1
    # The same on all ranks, which make theirs in the same order.
    agreements = Agreements(f"batches/{kind}/{_made[kind]}", timeout_s, MeetingPlace())
    return LengthBatches(dataset, Recipe(max_tokens, length, sort_buffer, collate, on_error), agreements)


@dataclass(frozen=True, slots=True)
class Agreements:
    """Makes agreements between ranks over the store of torch.distributed. Can be pickled for DataLoader workers."""

    name: str
    timeout_s: float
    place: MeetingPlace

    def __call__(self, reader: Topology) -> Agreement:
        """Return the agreement of one iteration, with the same worker of all ranks."""
        channel = f"{self.name}/{reader.worker}of{reader.workers}"
        return Agreement(channel, Ranks(reader.rank, reader.world_size), self.timeout_s, self.place)


class LengthBatches(IterableDataset[Any]):
    """The batches of `batch_by_length`; see there. To be used with `DataLoader(..., batch_size=None)`."""

    def __init__(self, dataset: Source, recipe: Recipe, agreements: Callable[[Topology], Agreeing]) -> None:
        self._dataset = dataset
        self._recipe = recipe
        self._agreements = agreements
        self._loaded: Any = None
        self._state: State | None = None

    def __repr__(self) -> str:
        return f"LengthBatches({self._dataset!r}, max_tokens={self._recipe.max_tokens})"

    def __len__(self) -> int:
        """Raise TypeError: how many batches there are depends on lengths that were not read yet."""
        raise TypeError("the number of batches by length is not known before the samples have been read")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration reads, in living DataLoader workers, too."""
        self._dataset.set_epoch(epoch)

    def state_dict(self) -> State:
        """Return where the iteration stands, behind the batch given last: a few numbers, none of the samples.

        They are the dataset's state where the present buffer begins, the number of batches given of it, and, as
        "beyond" in the dataset's state, a bit for each sample of the buffer that says whether it was in them.
        """
        if self._state is not None:
            return self._state
        reader, epoch = self._dataset.topology(), self._dataset.epoch
        start = Buffer(0, self._dataset.state_dict(), self._dataset.position)
        return find_state(self._loaded, reader, epoch) or state_of(reader, epoch, start)

    def load_state_dict(self, state: Any) -> None:
        """Have the next iteration go on from a state, or from whatever holds states, as a StatefulDataLoader's own.

        The same ranks and workers read their buffers again, and go on with the very next batch. Other ranks or workers
        go on with all samples that were in no batch yet, if they are given the states of all ranks. Given those of one
        rank, they read the buffers that the others had in hand from the beginning: at most `sort_buffer` samples of
        each worker come for the second time, and none is lost.
        """
        self._loaded, self._state = state, None
        self._dataset.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        # Not a generator itself: StatefulDataLoader asks for the state between this call and the first batch.
        agreement = self._agreements(self._dataset.topology())
        rounds = Rounds(self._dataset, self._recipe, agreement, self._loaded)
        self._state = rounds.state
        return self._follow(rounds)

    def _follow(self, rounds: Rounds) -> Iterator[Any]:
        for batch, self._state in rounds:
            yield batch
