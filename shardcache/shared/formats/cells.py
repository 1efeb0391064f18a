"""A table of samples whose members are the cells of columns, built sample by sample.

Formats with columns instead of files (JSON Lines, TFRecord, parquet) fill a `CellTable` as they
index a shard. A cell is the bytes of one column of one sample. A fault is the reason why a sample
is unusable although its shard is intact.
"""

from collections.abc import Iterable

from shardcache.shared.exceptions import UnsupportedShardError
from shardcache.shared.tarindex.tables import Fault, Samples

MAX_SAMPLES = 8_000_000
"""Limit for one shard: its index takes some 50 bytes of memory per sample of any size."""

MAX_CELLS = 32_000_000
"""Limit for one shard: its index takes 20 bytes of memory per cell."""

MAX_COLUMNS = 65_536
"""Limit for one shard: each reader has the names of all columns in memory."""

MAX_NAMES_BYTES = 16 * 1024 * 1024
"""Limit for the names of a shard's columns together, in UTF-8: each reader has them in memory."""

KEY = "__key__"
URL = "__url__"
BAD = "__bad__"
RESERVED = frozenset({KEY, URL, BAD})
"""Names that every sample has, or that have a meaning in WebDataset: no member has such a name.

A shard that was converted from a tar may have columns of these names. The values of `__key__`
become the samples' keys, and a column `__url__` is left out.
"""

Cell = tuple[int, tuple[int, int]]
"""The number of a cell's column, and the cell's start and end in the file, in bytes."""

_NUMBER_AS_KEY = b"%09d"


class CellTable:
    """Builds the table of a shard that has columns instead of files.

    Attributes:
        samples: the samples added so far.
    """

    def __init__(
        self,
        url: str,
        max_samples: int = MAX_SAMPLES,
        max_cells: int = MAX_CELLS,
        max_columns: int = MAX_COLUMNS,
    ) -> None:
        """Begin without samples.

        Args:
            url: url of the shard, for errors.
            max_samples: limit for the number of samples.
            max_cells: limit for the number of cells of all samples.
            max_columns: limit for the number of columns.
        """
        self.samples = Samples()
        self._url = url
        self._max_samples = max_samples
        self._max_cells = max_cells
        self._max_columns = max_columns
        self._column_numbers: dict[str, int] = {}  # by the column's name
        self._names_bytes = 0

    def column(self, name: str) -> int:
        """Return the number of a column, which is added if its name is new.

        Raises UnsupportedShardError if there are too many columns, or their names are too long;
        UnicodeEncodeError, a ValueError, for a name with half a surrogate pair.
        """
        number = self._column_numbers.get(name)
        if number is None:
            number = len(self._column_numbers)
            if number == self._max_columns:
                raise self._too_many(self._max_columns, "columns")
            self._names_bytes += len(name.encode())
            if self._names_bytes > MAX_NAMES_BYTES:
                raise self._too_many(MAX_NAMES_BYTES, "bytes of column names")
            self._column_numbers[name] = number
            self.samples.extensions.append(name)
        return number

    def add(self, cells: Iterable[Cell], key: bytes | None = None) -> None:
        """Add a sample. Raises UnsupportedShardError for too many samples or cells.

        Args:
            cells: the cells of the sample. If a column has several, readers use the last one.
            key: key of the sample; None to use the sample's number.
        """
        samples = self.samples
        self._begin(key)
        for column, (start, end) in cells:
            samples.extension_ids.append(column)
            samples.starts.append(start)
            samples.ends.append(end)
        samples.end()
        if len(samples.starts) > self._max_cells:
            raise self._too_many(self._max_cells, "values")

    def add_fault(self, fault: Fault, column: str, key: bytes | None = None) -> None:
        """Add a sample that is unusable. Raises UnsupportedShardError for too many samples.

        Args:
            fault: the reason why the sample is unusable.
            column: name of the column that the fault is about.
            key: key of the sample; None to use the sample's number.
        """
        samples = self.samples
        samples.faults[len(samples)] = (fault, self.column(column))
        self._begin(key)
        samples.end()

    def _begin(self, key: bytes | None) -> None:
        """Begin the next sample; if the key is None, it is the sample's number."""
        samples = self.samples
        if len(samples) == self._max_samples:
            raise self._too_many(self._max_samples, "samples")
        if key is None:
            key = _NUMBER_AS_KEY % len(samples)
        samples.begin(key)

    def _too_many(self, limit: int, plural: str) -> UnsupportedShardError:
        return UnsupportedShardError(
            f"the shard has more than {limit:,} {plural}, whose index would take too much memory",
            url=self._url,
            remedy="write smaller shards",
        )
