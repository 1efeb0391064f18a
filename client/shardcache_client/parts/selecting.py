"""Methods of datasets that return datasets of some of their samples.

`Divisible` is the base of datasets whose samples can be chosen by number, and `Selecting` of those
that have tables of their samples. A choice is the samples of one shard that a dataset keeps; each
method makes the choices of all shards, and `_selected` the dataset of these.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self, SupportsIndex

from shardcache.shared.tarindex.contents import IndexEntry, Row
from shardcache_client.arguments.values import FUNCTION, SAMPLE_NUMBERS, SPLIT_RULES, checked
from shardcache_client.order.shards.choices import By, Choices
from shardcache_client.order.shards.choices import split as choices_of_split
from shardcache_client.order.shards.choices import subset as choices_of_subset
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.parts.sample_tables import select as choices_of_select


def counts_of(manifest: Manifest) -> Sequence[int]:
    """Return the number of samples in each shard. Raises ConfigError if they are not counted."""
    if manifest.counts is None:
        raise manifest.uncounted_error("samples have no numbers")
    return manifest.counts


class Divisible(ABC):
    """A dataset of which samples can be chosen by their numbers."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The shards, with sizes and sample counts where known."""

    @abstractmethod
    def _selected(self, choices: Choices) -> Self:
        """Return a dataset of some of the samples. Raises ConfigError if it would have none."""

    @checked(numbers=SAMPLE_NUMBERS)
    def subset(self, numbers: Iterable[SupportsIndex]) -> Self:
        """Return a dataset of the samples with these numbers, such as `range(1000)`; see `select`.

        Samples are numbered in the order of `urls`, as by `indexed`. The subset has each sample
        once, also if `numbers` repeats it. They are read in the order of `urls`, or shuffled if the
        dataset shuffles, whatever the order of `numbers`. Needs no table.

        Raises ConfigError if the samples are not counted, or `numbers` is empty; IndexError for a
        number out of range.
        """
        choices = choices_of_subset(counts_of(self.manifest), map(int, numbers))
        return self._selected(choices)

    @checked(**SPLIT_RULES)
    def split(self, *fractions: float, seed: int = 0, by: By = "samples") -> list[Self]:
        """Return datasets that divide the samples of this one at random::

            train, val = dataset.split(0.9, 0.1)

        The parts depend on the shards' sample counts, the fractions and `seed` alone: they are the
        same in every process and run. Otherwise as `select`; needs no table.

        Args:
            fractions: fraction of the samples for each part; the fractions add up to 1.
            seed: determines the split; another seed gives another split.
            by: "samples" divides every shard. The parts have exactly these fractions of all
                samples, and nearly these fractions of each shard: so each part reads all shards.
                "shards" gives each shard to one part. The sizes of the parts are right to within a
                shard, a part fetches only its own shards, and samples that were written together
                stay together.

        Raises ConfigError if the samples are not counted, for wrong fractions, or if a part would
        be empty.
        """
        parts = choices_of_split(counts_of(self.manifest), fractions, seed, by)
        return [self._selected(choices) for choices in parts]


class Selecting(Divisible):
    """A dataset of which samples can be chosen by the facts that its index has about them."""

    @abstractmethod
    def _rows_of_tables(self) -> Iterator[tuple[str, Row]]:
        """Yield the rows of the sample tables, each with its table's url.

        Raises ConfigError if a table is missing.
        """

    @checked(predicate=FUNCTION)
    def select(self, predicate: Callable[[IndexEntry], object]) -> Self:
        """Return a dataset of the samples for which `predicate(entry)` is true::

            large = dataset.select(lambda entry: entry.sizes.get("jpg", 0) >= 10_000)

        An entry has the sample's `key`, the `sizes` of its members in bytes, by extension, the
        `url` of its shard, and `metadata`, the JSON object of one small member, if the table was
        made with `--metadata`. No sample is read for this; shards without a selected sample are
        never fetched. The selection is as good as a dataset written without the other samples: it
        has an exact length, ranks get equal numbers of samples, and its states resume on any number
        of ranks and workers. The predicate must be the same on all ranks; with torch.distributed,
        ranks that select different samples are an error. The dataset begins with the epoch of this
        one, and keeps epochs and states of its own.

        The entries are in a table of all samples, `index.samples` beside `index.json`. `shardcache
        write` makes both files. For shards that were written by other programs, make both with
        `shardcache index URL... -o index.json --samples`. If `--metadata json` is added, the table
        also has the samples' `json` members.

        Raises ConfigError if the urls are not index files, if the table is missing or belongs to
        other shards, if no sample is selected, or if `entry.metadata` is read from a table without
        metadata. Raises the errors of reading the table, and those that the predicate raises.
        """
        choices = choices_of_select(self.manifest, self._rows_of_tables(), predicate)
        return self._selected(choices)
