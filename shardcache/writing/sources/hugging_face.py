"""Datasets of Hugging Face's `datasets`, saved on disk or from the hub: each row becomes a sample."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets

from shardcache.errors import ConfigError, InputError
from shardcache.writing.plan.samples import Sample
from shardcache.writing.sources.columns import columns_of, samples, sizes

HUB = "hf:"
"""Prefix of a dataset's name on the hub."""

_BLOCK_ROWS = 1024


class HuggingFace:
    """The rows of one split; a position is a place in the order of the rows.

    Rows are read from mapped Arrow files, in blocks. With a seed, the blocks come in random order, and the rows of
    each, too. A sample's key is its row's number, whatever the order.

    Args:
        name: folder of a dataset written by `save_to_disk`, or `hf:` and a name on the hub.
        split: the split, if there are several.
        columns: column → extension; all columns if empty.
        seed: the seed of the order, or None for the dataset's own.
    """

    def __init__(self, name: str, split: str | None, columns: Mapping[str, str], seed: int | None) -> None:
        found = _loaded(name, split)
        self.identity = str(found._fingerprint)
        self._rows = found.with_format("arrow")
        self._columns = columns_of(self._rows.features.arrow_schema, columns, name)
        self._rows = self._rows.select_columns([column.name for column in self._columns])
        self._seed = seed
        self._blocks = list(range(0, len(self._rows), _BLOCK_ROWS))
        if seed is not None:
            random.Random(seed).shuffle(self._blocks)

    def positions(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """As `Source.positions`."""
        for place, start in enumerate(self._blocks):
            numbers = self._numbers(start)
            for row, size_bytes in enumerate(sizes(self._table(numbers), self._columns)):
                yield size_bytes, (place, row)

    def read(self, first: Sequence[int], last: Sequence[int]) -> Iterator[Sample]:
        """As `Source.read`."""
        for place in range(first[0], last[0] + 1):
            begin = first[1] if place == first[0] else 0
            stop = last[1] + 1 if place == last[0] else _BLOCK_ROWS
            numbers = self._numbers(self._blocks[place])[begin:stop]
            yield from samples(self._table(numbers), self._columns, numbers)

    def _numbers(self, start: int) -> Sequence[int]:
        numbers = range(start, min(start + _BLOCK_ROWS, len(self._rows)))
        return numbers if self._seed is None else random.Random(f"{self._seed}/{start}").sample(numbers, len(numbers))

    def _table(self, numbers: Sequence[int]) -> Any:
        if isinstance(numbers, range):
            return self._rows[numbers.start : numbers.stop]
        return self._rows[list(numbers)]


def _loaded(name: str, split: str | None) -> datasets.Dataset:
    try:
        if name.startswith(HUB):
            found = datasets.load_dataset(name.removeprefix(HUB), split=split)
        else:
            found = datasets.load_from_disk(name)
            if isinstance(found, datasets.DatasetDict) and split in found:
                return found[split]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exn:
        raise InputError(f"cannot load the dataset ({exn})", url=name, remedy="check its name and --split") from exn
    if isinstance(found, Mapping):
        raise ConfigError(
            f"the dataset has several splits, and {split or 'none'} is chosen",
            url=name,
            remedy=f"choose one with --split: {', '.join(found)}",
        )
    return found
