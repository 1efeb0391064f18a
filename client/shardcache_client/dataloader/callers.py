"""Properties of the DataLoader around a dataset, read from the call stack, since torch passes none of them on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True)
class Batching:
    """The batching of a loader; batches of one sample if it does not batch."""

    batch_size: int
    drop_last: bool


def batching_of(dataset: object) -> Batching | None:
    """Return the batching of the loader that requests a sample; None if there is no loader, or it is unknown.

    A user's dataset between the two is assumed to yield one item per sample, unless the loader does not batch.
    """
    for frame in frames():
        if frame.f_code.co_name == "fetch" and frame.f_globals.get("__name__") == "torch.utils.data._utils.fetch":
            fetcher: Any = frame.f_locals["self"]
            size = len(frame.f_locals["possibly_batched_index"]) if fetcher.auto_collation else 1
            if fetcher.dataset is dataset:
                return Batching(size, fetcher.drop_last)
            return Batching(size, False) if size > 1 else None
    return None


def batch_size_of_loader_asking_length(dataset: object) -> int | None:
    """Return the batch_size of the multi-worker DataLoader whose `__len__` calls the dataset's; None otherwise."""
    asking = sys._getframe(2)  # 0 is this function, 1 the dataset's own `__len__`
    loader = asking.f_locals.get("self") if asking.f_code.co_name == "__len__" else None
    if getattr(loader, "dataset", None) is not dataset or getattr(loader, "num_workers", 0) < 2:
        return None
    batch_size: int | None = getattr(loader, "batch_size", None)
    return batch_size


def replicas_of_sampler_asking_length() -> int | None:
    """Return the number of ranks of the DistributedSampler whose constructor calls a dataset's `__len__`."""
    asking = sys._getframe(2)  # 0 is this function, 1 the dataset's own `__len__`
    found = asking.f_code.co_qualname == "DistributedSampler.__init__"
    return asking.f_locals["self"].num_replicas if found else None


def stateful_loader_asks() -> bool:
    """Return True if the caller is torchdata's StatefulDataLoader, whose own state records the end of an iteration."""
    return any(str(frame.f_globals.get("__name__")).startswith("torchdata.") for frame in frames())


def frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, from the caller's caller outwards."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
