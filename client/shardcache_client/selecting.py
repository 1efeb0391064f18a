"""Selection of samples by what the index of their shard, or a table made of it, says of them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self, SupportsIndex

from shardcache.errors import ConfigError, NotFoundError
from shardcache.tarindex import IndexEntry, Row, entries_of
from shardcache.tarindex.sample_rows import SUFFIX
from shardcache_client.arguments import CHOSEN, FUNCTION, SPLIT, checked
from shardcache_client.files.slicing import Sample
from shardcache_client.indexed import counts_of
from shardcache_client.order.manifest import By, Choices, Manifest, Marked, split, subset

_INDEX = ".json"
_REMEDY = "write both files again: shardcache index URL... -o index.json --samples"


class Selecting(ABC):
    """A dataset of which samples can be chosen.

    Attributes:
        manifest: the shards.
    """

    manifest: Manifest

    @abstractmethod
    def _selected(self, choices: Choices) -> Self:
        """Return a dataset of some of the samples. Raises ConfigError if it would have none."""

    @abstractmethod
    def _rows_of_tables(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows of the sample tables, each with its table's url."""

    @checked(predicate=FUNCTION)
    def select(self, predicate: Callable[[IndexEntry], object]) -> Self:
        """Return a dataset of those samples for which `predicate(entry)` is true, chosen by the index alone::

            large = dataset.select(lambda entry: {"jpg", "txt"} <= entry.sizes.keys() and entry.sizes["jpg"] >= 10_000)

        An entry has the sample's `key`, the `sizes` of its members in bytes, by extension, the `url` of its shard, and
        `metadata`, the JSON object of one small member, if the table was made with `--metadata`.
        No sample is read for this; shards without a selected sample are never fetched. The selection is as good as a
        dataset written without the other samples: it has an exact length, ranks get equal numbers of samples, and its
        states resume on any number of ranks and workers. The predicate must be the same on all ranks; with
        torch.distributed, ranks that select different samples are an error. The dataset begins with the epoch of this
        one, and keeps epochs and states of its own.

        The entries are in a table of all samples, `index.samples.tar` beside `index.json`. The command
        `shardcache index URL... -o index.json --samples` writes both; store them in the same place. With
        `--metadata json` it keeps the samples' `json` members in the table.

        Raises ConfigError if the urls are no index files, or for a table that is missing or belongs to other shards, or
        if no sample is selected, or for the metadata of a table without; and what reading the table and the predicate
        raise.
        """
        return self._selected(_select(self.manifest, self._found_rows(), predicate))

    def _found_rows(self) -> Iterator[tuple[str, Row]]:
        try:
            yield from self._rows_of_tables()
        except NotFoundError as exn:
            raise ConfigError(
                "select() needs a table of the samples, which is missing",
                url=exn.url,
                remedy="write it beside the index: shardcache index URL... -o index.json --samples",
            ) from exn

    @checked(numbers=CHOSEN)
    def subset(self, numbers: Iterable[SupportsIndex]) -> Self:
        """Return a dataset of the samples with these numbers, such as `range(1000)`; otherwise as `select`.

        Samples are numbered in the order of `urls`, as by `indexed`. The subset has each of them once, in that order or
        its own shuffle's. Needs no table.

        Raises ConfigError if the samples are not counted, or without any number; IndexError for one out of range.
        """
        return self._selected(subset(counts_of(self.manifest), map(int, numbers)))

    @checked(**SPLIT)
    def split(self, *fractions: float, seed: int = 0, by: By = "samples") -> list[Self]:
        """Return datasets that divide the samples of this one at random, such as for training and validation::

            train, val = dataset.split(0.9, 0.1)

        The parts depend on the shards' sample counts, the fractions and `seed` alone: they are the same in every
        process and run. Otherwise as `select`; needs no table.

        Args:
            fractions: of the samples, for each part; their sum is 1.
            seed: another seed gives another split.
            by: "samples": the parts have exactly these fractions of the samples, and nearly so of each shard, so that
                each part reads all shards. "shards": each shard belongs to one part, and the sizes are right to a
                shard: a part fetches no more than its own, and samples that were written together stay together.

        Raises ConfigError if the samples are not counted, for wrong fractions, or if a part would be empty.
        """
        return [self._selected(choices) for choices in split(counts_of(self.manifest), fractions, seed, by)]


def tables_of(patterns: Sequence[str]) -> list[str]:
    """Return the urls of the sample tables beside index files. Raises ConfigError for a url of anything else."""
    for pattern in patterns:
        if not pattern.endswith(_INDEX):
            raise ConfigError(
                "select() needs a table of the samples, which lies beside an index file",
                url=pattern,
                remedy="write both: shardcache index URL... -o index.json --samples; then use index.json as the url",
            )
    return [pattern.removesuffix(_INDEX) + SUFFIX for pattern in patterns]


def row_of(sample: Sample) -> tuple[str, Row]:
    """Return the row that a sample of a table holds, with the table's url. Raises ValueError, KeyError."""
    return sample["__url__"], json.loads(sample["json"])


def _select(manifest: Manifest, rows: Iterable[tuple[str, Row]], predicate: Callable[[IndexEntry], object]) -> Choices:
    """Return the choice of those samples of a manifest for which the predicate is true.

    Args:
        manifest: the shards of index files.
        rows: of the tables beside them, each with its table's url.

    Raises ConfigError if the tables belong to other shards, and what the predicate raises.
    """
    marks = [bytearray() for _ in manifest]  # of the samples that belong to the dataset
    passed = [0] * len(manifest)
    table, begin, shard = "", 0, -1
    for url, row in rows:
        if url != table:
            table, begin = url, shard + 1
        try:
            shard = begin + row["shard"]
            entries = list(entries_of(row, manifest[shard].url))
            known = row["first"] == passed[shard] and row["samples"] == manifest[shard].samples
            known = known and manifest[shard].version in (None, row["version"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exn:
            raise ConfigError(f"the table of samples is invalid ({exn!r})", url=url, remedy=_REMEDY) from exn
        if not known:
            raise ConfigError(
                f"the table of samples is not that of the index file: {manifest[shard].url} differs",
                url=url,
                remedy=_REMEDY,
            )
        marks[shard] += bytes(map(bool, map(predicate, entries)))
        passed[shard] += len(entries)
    for number, ref in enumerate(manifest):
        if passed[number] != ref.samples:
            raise ConfigError("the table of samples does not cover this shard completely", url=ref.url, remedy=_REMEDY)
    return tuple(_marked(marks[number], manifest.chosen(number)) for number in range(len(manifest)))


def _marked(marks: bytearray, chosen: Sequence[int] | None) -> Marked | None:
    return Marked.of(marks if chosen is None else [marks[number] for number in chosen])
