"""partition.py: what a real DataLoader takes from its workers; the spans themselves are tested with progress.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardcache_client.order.partition import taken_in_turns


class Workers(IterableDataset[int]):
    """Each worker gives its own number, as often as `sizes` says."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter([info.id] * self._sizes[info.id])


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("sizes", "batch_size"),
    [
        ([7, 7, 7], 2),
        ([1, 9, 4], 3),
        ([0, 5, 0, 8], 2),
        ([12, 3], 1),
        ([12, 16, 18], 4),  # as `Cut` deals 46 samples
    ],
)
def test_a_loader_takes_batches_in_turns(sizes: list[int], batch_size: int) -> None:
    """After each batch that a loader with workers gives, so many samples of each worker have been in it or before."""
    given = [0] * len(sizes)
    loader = DataLoader(Workers(sizes), batch_size=batch_size, num_workers=len(sizes))
    for batches, batch in enumerate(loader):
        assert taken_in_turns(sizes, batch_size, batches) == given
        for worker in batch.tolist():
            given[worker] += 1
    assert taken_in_turns(sizes, batch_size, 10**9) == given == sizes


@given(st.lists(st.integers(0, 40), min_size=1, max_size=16), st.integers(1, 9), st.integers(0, 200))
def test_turns_are_counted_without_taking_them(sizes: list[int], batch_size: int, batches: int) -> None:
    """The same as if each batch were taken by itself, for any sizes."""
    given = list(sizes)
    for worker in list(turns([-(-size // batch_size) for size in sizes]))[batches:][::-1]:
        given[worker] -= (given[worker] - 1) % batch_size + 1
    assert taken_in_turns(sizes, batch_size, batches) == given


def turns(left: list[int]) -> Iterator[int]:
    """Yield the worker of each batch, round by round, as long as any has batches left."""
    while any(left):
        yield from (worker for worker, batches in enumerate(left) if batches)
        left = [max(0, batches - 1) for batches in left]
