"""The options, attributes and dataset by which a ShardLoader resembles torch's DataLoader.

Frameworks look at these, although a ShardLoader is not a DataLoader.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from shardcache.shared.exceptions import ConfigError
from shardcache_client.loading.worker_choice import process_option_in
from shardcache_client.reader import ShardReader

ORDER_OPTIONS = ("sampler", "batch_sampler", "shuffle")
"""Options of a DataLoader that a loader refuses: its dataset determines the order."""

DATALOADER_ATTRIBUTES = inspect.signature(DataLoader).parameters.keys() - {*ORDER_OPTIONS}
"""Attributes of a DataLoader that a loader has as well, for frameworks that look at them."""


def refuse_order_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option would change the order of the samples."""
    for name in ORDER_OPTIONS:
        value = options.get(name)
        # The value is not just tested for truth: an empty sampler is a sampler, too.
        is_false = isinstance(value, int) and value == 0
        if value is not None and not is_false:
            raise ConfigError(
                f"loader() does not take {name}: the dataset determines the order of its samples",
                remedy="pass shuffle, shuffle_window and seed to the ShardDataset",
            )


def new_template(options: Mapping[str, Any], collate_fn: Callable[[Any], Any]) -> DataLoader[Any]:
    """Return a DataLoader with a loader's options, over an empty dataset, which is never read.

    The DataLoader checks the options, and has the attributes that frameworks look at.

    Args:
        options: arguments of a DataLoader, and `workers`.
        collate_fn: makes a batch of samples.
    """
    torch_options = {name: value for name, value in options.items() if name != "workers"}
    if options["workers"] == "threads":
        option = process_option_in(torch_options)
        if option:
            raise ConfigError(
                f"{option} applies to worker processes, but the loader's workers are threads",
                remedy='omit it; or write workers="processes"',
            )
        torch_options["num_workers"] = 0
        # A DataLoader refuses this option without worker processes.
        torch_options.pop("prefetch_factor", None)
    return DataLoader(_EmptyDataset(), collate_fn=collate_fn, **torch_options)


class LoadedDataset:
    """A loader's dataset for frameworks: it has all of its attributes, but is no IterableDataset.

    Lightning warns of the length of a loader over an IterableDataset, because a DataLoader's length
    is wrong unless the dataset divides its samples among the workers. A ShardLoader's is exact.
    """

    def __init__(self, dataset: ShardReader[Any]) -> None:
        self._dataset = dataset

    def __repr__(self) -> str:
        return repr(self._dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # happens while unpickling, before `_dataset` is set
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataset, name)


class _EmptyDataset(IterableDataset[Any]):
    """A dataset for a DataLoader that is not read."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())
