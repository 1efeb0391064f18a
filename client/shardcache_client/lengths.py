"""`batch_by_length`: batches of samples of similar length, for speech and text.

The batches are made by the stage `stages.by_length`, which regroups a dataset's samples, and agrees
with the other ranks on equal numbers of batches.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic

from torch.utils.data import IterableDataset

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments.values import (
    FUNCTION,
    SECONDS,
    Accepts,
    B_co,
    T_co,
    checked,
    instance,
    whole,
)
from shardcache_client.dataset import ShardDataset
from shardcache_client.handlers import ANY_HANDLER, Handler, handler_of, reraise
from shardcache_client.loading.loader import ShardLoader
from shardcache_client.ranks.agreement import agreement_of
from shardcache_client.ranks.key_value_store import StoreLocator
from shardcache_client.stages.by_length import ByLength

_calls: Counter[str] = Counter()  # number of calls of `batch_by_length`, by some of their arguments


@checked(
    dataset=instance("a ShardDataset or Mixture", ShardDataset),
    max_tokens=whole(1),
    length=FUNCTION,
    sort_buffer=whole(1),
    collate=FUNCTION.or_none(),
    on_error=Accepts(ANY_HANDLER, handler_of),
    timeout_s=SECONDS,
)
def batch_by_length(
    dataset: ShardDataset[T_co],
    max_tokens: int,
    length: Callable[[T_co], int],
    *,
    sort_buffer: int = 1_000,
    collate: Callable[[list[T_co]], B_co] | None = None,
    on_error: Handler | str = reraise,
    timeout_s: float = 300.0,
) -> "LengthBatches[B_co]":
    """Batch samples of similar length: little padding, and no batch too large for the accelerator.

        ds = ShardDataset(urls, shuffle=True, decode=tokenize)
        loader = batch_by_length(ds, 16_000, len, collate=pad).loader(num_workers=8)

    The dataset reads `sort_buffer` samples at a time, sorts them, and cuts them into as few batches
    as `max_tokens` allows, or a few more if another rank needs more: every rank yields the same
    number of batches, and the batches of one step have similar lengths on all ranks. The batches of
    a buffer come in an order shuffled by seed and epoch.

    Each sample comes once, with one exception: if a rank has fewer samples in a buffer than batches
    to make, its shortest sample is repeated. This happens only if the rank reads fewer samples than
    another rank, or if many samples are too long.

    Args:
        dataset: a `ShardDataset` or `Mixture`.
        max_tokens: maximum padded size of a batch: number of samples times length of the longest,
            in any unit.
        length: returns a sample's length in that unit, always the same for the same sample; random
            changes of length belong in `collate`. A length below 1 counts as 1.
        sort_buffer: number of samples that are kept in memory; by each worker, if a plain
            DataLoader reads the batches. Larger buffers mean less padding.
        collate: makes a batch from a list of samples. Default: the list itself.
        on_error: called with the SampleError of a sample that is longer than `max_tokens`, or whose
            length is not a whole number. See `handlers`.
        timeout_s: how long a rank waits for the others to fill their buffers.

    Raises:
        ConfigError: an argument is invalid, or the dataset has `global_batch_size`; or, when
            iterating, the ranks share no key-value store over which to agree, or one of them has no
            samples at all.
        RankTimeoutError, RanksError: a rank does not answer.
    """
    if dataset.has_global_batches:
        raise ConfigError(
            "the dataset has global_batch_size, and batches by length have different numbers of "
            "samples",
            remedy="omit global_batch_size",
        )
    # Ranks agree under a name. The name is the same on all ranks, because they call this function
    # with the same arguments in the same order.
    arguments = f"{dataset.seed}/{max_tokens}/{sort_buffer}"
    _calls[arguments] += 1
    name = f"batches/{arguments}/{_calls[arguments]}"
    agreement = partial(agreement_of, name, timeout_s, StoreLocator())
    stage = ByLength(
        max_tokens, length, sort_buffer, collate or list, handler_of(on_error), agreement
    )
    return LengthBatches(dataset, dataset.regrouped(stage))


class LengthBatches(IterableDataset[B_co], Generic[B_co]):
    """The batches of `batch_by_length`: for `DataLoader(..., batch_size=None)`, or by `loader()`.

    A `set_epoch` or `load_state_dict` of the dataset holds for the batches, too.

    Args:
        dataset: the dataset of samples, whose epoch and state the batches follow.
        batches: a dataset that yields the batches.
    """

    def __init__(self, dataset: ShardDataset[Any], batches: ShardDataset[Any]) -> None:
        self._dataset = dataset
        self._batches = batches

    def __repr__(self) -> str:
        return f"LengthBatches({self._dataset!r})"

    def __len__(self) -> int:
        """Raise TypeError: the number of batches depends on lengths that have not been read yet."""
        raise TypeError(
            "the number of batches by length is unknown until the samples have been read"
        )

    def _batches_at_position(self) -> ShardDataset[Any]:
        """Return the dataset of batches, at the epoch or state last set for the samples."""
        self._batches.follow(self._dataset)
        return self._batches

    def __iter__(self) -> Iterator[B_co]:
        return iter(self._batches_at_position())

    @property
    def epoch(self) -> int:
        """The epoch that this process is reading, or else the next epoch that it would read."""
        return self._batches_at_position().epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next iteration reads, even in running DataLoader workers."""
        self._batches_at_position().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: a few numbers, and no samples.

        The numbers are the place at which the current buffer begins, the number of batches given
        from this buffer, and a bit for each of its samples, which is set if the sample was given.
        """
        return self._batches_at_position().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Resume the next iteration from a state, or any structure that contains states.

        If the numbers of ranks and workers are the same, they read their buffers again and continue
        with exactly the next batch; one rank's state is enough for that. If the numbers differ, the
        run resumes with exactly the samples that were in no batch yet, from the states of all
        ranks. One rank's state is enough only if it was taken between two buffers, and if no
        handler, `missing="skip"` or filter may leave out samples before they are batched; otherwise
        the next iteration raises a ConfigError. If the shards' samples are not counted, the numbers
        of ranks and workers cannot change.
        """
        self._batches_at_position().load_state_dict(state)

    def loader(self, **options: Any) -> ShardLoader[B_co]:
        """Return a loader of these batches; `ShardDataset.loader` describes the arguments.

        The loader's workers decode samples, and this process sorts and collates them. So the
        batches are the same for any number and kind of workers. The loader takes no `batch_size`
        and no `collate_fn`, as the samples are in batches already.
        """
        for name in ("batch_size", "collate_fn", "drop_last"):
            if options.pop(name, None) is not None:
                raise ConfigError(
                    f"loader() of batches by length does not take {name}: they are batches already",
                    remedy="omit it; give collate to batch_by_length",
                )
        return self._batches_at_position().loader(batch_size=None, collate_fn=_unchanged, **options)


def _unchanged(batch: Any) -> Any:
    """Return a batch as it is; stands in for a `collate_fn` of None.

    With None, torch would convert the batch's arrays to tensors.
    """
    return batch
