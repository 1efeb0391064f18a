"""Columns of MDS and LitData, in which each sample of a shard has the same columns.

The values of a sample are stored one after another. `ColumnWalk` indexes a shard, given the offsets
of its samples and its columns. The walk can begin while the shard is still arriving.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

from shardcache.shared.exceptions import CorruptShardError, UnsupportedShardError
from shardcache.shared.formats.cells import MAX_COLUMNS, RESERVED
from shardcache.shared.formats.chunks.offset_table import BytesAt
from shardcache.shared.tarindex.tables import Samples


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """Names of columns, and how their values are stored.

    Attributes:
        names: name of each column, as the writer spelt it.
        encodings: encoding of each column's values.
        sizes: size in bytes of each column's values. None for a column whose values have different
            sizes: each sample states them before its values.
    """

    names: Sequence[str]
    encodings: Sequence[str]
    sizes: Sequence[int | None]

    def check(self, url: str) -> None:
        """Raise CorruptShardError for columns that contradict each other.

        Raises UnsupportedShardError for a column with a reserved name, such as `__key__`.
        """
        damage = self._damage()
        if damage is not None:
            raise CorruptShardError(f"its description of columns is damaged: {damage}", url=url)
        reserved_names = RESERVED.intersection(self.names)
        if reserved_names:
            raise UnsupportedShardError(
                f"a column has the name {min(reserved_names)!r}, which every sample has",
                url=url,
                remedy="write the dataset with another name for it",
            )

    def _damage(self) -> str | None:
        """Return the reason why the columns are damaged; None if they are not.

        The columns come from JSON in the file, so their types have to be checked, too.
        """
        lists: tuple[object, ...] = (self.names, self.encodings, self.sizes)
        if not all(isinstance(each, list) for each in lists):
            return "its columns are not lists"
        if not self.names or len(self.names) > MAX_COLUMNS:
            return f"it has {len(self.names)} columns"
        if not len(self.names) == len(self.encodings) == len(self.sizes):
            return "its columns have different numbers of names, encodings and sizes"
        if not all(_is_text(each) for each in (*self.names, *self.encodings)):
            return "a column's name or encoding is not text"
        if not all(size is None or _is_size(size) for size in self.sizes):
            return "a column's size is not a positive number of 32 bits"
        if len(set(self.names)) < len(self.names):
            return "two of its columns have the same name"
        return None


def _is_text(value: object) -> bool:
    """Return True for a text that UTF-8 can encode; JSON may also state half a surrogate pair."""
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_size(size_bytes: object) -> bool:
    """Return True for a positive integer that fits into 32 bits; False for a bool."""
    return type(size_bytes) is int and 0 < size_bytes < 2**32


class ColumnWalk:
    """A `Walk` over a shard whose samples all have the same columns.

    A sample begins with its head, the sizes of its values in columns without a fixed size. All of
    its values follow.

    Args:
        bytes_at: reads the shard.
        offsets: the offset of each sample, and of the byte after the last sample.
        columns: the columns.
        url: url of the shard, for errors.
    """

    def __init__(
        self,
        bytes_at: BytesAt,
        offsets: Sequence[int],
        columns: ChunkColumns,
        url: str,
    ) -> None:
        columns.check(url)
        # To the index, a column is a member of a sample, and the column's name is the member's
        # extension, as in a tar.
        self.samples = Samples(
            extensions=list(columns.names),
            encodings=list(columns.encodings),
        )
        self._bytes_at = bytes_at
        self._offsets = offsets
        self._url = url
        # The size of each column's values; 0 for a column without a fixed size.
        self._fixed_sizes = [size or 0 for size in columns.sizes]
        # The numbers of the columns without a fixed size.
        self._variable_columns = [
            column for column, size in enumerate(columns.sizes) if size is None
        ]
        self._head = Struct(f"<{len(self._variable_columns)}I")
        self._column_numbers = range(len(columns.names))
        self._next_number = 0  # number of the next sample

    def advance(self) -> bool:
        """Add the next sample; return False at the end of the shard."""
        number = self._next_number
        if number + 1 >= len(self._offsets):
            return False
        begin = self._offsets[number]
        end = self._offsets[number + 1]
        head_bytes = self._head.size
        if begin + head_bytes > end:
            raise self._damaged(number, "it is too short for the sizes of its columns")
        # In a shard that is still arriving, this read waits for the head of the sample. The sample
        # before it has then arrived as a whole, but the values of this one may arrive later.
        head = self._bytes_at(begin, head_bytes)
        variable_sizes = self._head.unpack(head)

        samples = self.samples
        samples.begin(_key_of_number(number))  # completes the sample before
        sizes = self._fixed_sizes.copy()
        for column, size_bytes in zip(self._variable_columns, variable_sizes, strict=True):
            sizes[column] = size_bytes
        at = begin + head_bytes
        for value_bytes in sizes:
            samples.starts.append(at)
            at += value_bytes
            samples.ends.append(at)
        samples.extension_ids.extend(self._column_numbers)
        if at != end:
            raise self._damaged(
                number, f"its columns end at byte {at}, but the sample at byte {end}"
            )
        self._next_number = number + 1
        return True

    def finish(self) -> Samples:
        """Add all samples that are left, and return the samples of the whole shard."""
        while self.advance():
            pass
        self.samples.end()
        return self.samples

    def _damaged(self, number: int, problem: str) -> CorruptShardError:
        at = self._offsets[number]
        return CorruptShardError(
            f"the sample {number} at byte {at} is damaged: {problem}", url=self._url
        )


def _key_of_number(number: int) -> bytes:
    """Return a sample's key: its number in the shard, as these formats have no keys.

    The zeros in front let keys sort in the order of the samples.
    """
    return b"%08d" % number
