"""The table at the beginning of MDS shards and LitData chunks: the offsets of the samples.

count       number of samples, u32
offsets     u32[count + 1]: offset of each sample, and of the byte after the last sample

Numbers are little-endian. `ForwardReader` reads this table, and then the head of each sample: the
sizes of the values in it. It serves both complete files and shards that are still arriving.
"""

import sys
from array import array
from collections.abc import Callable
from itertools import islice
from operator import le

from shardcache.shared.exceptions import CorruptShardError, TruncatedShardError
from shardcache.shared.tarindex.members import Read

U32_BYTES = 4
_WINDOW_BYTES = 64 * 1024

BytesAt = Callable[[int, int], bytes]
"""`bytes_at(offset, size_bytes)` returns exactly that number of bytes of a shard."""


class ForwardReader:
    """Reads small pieces of a shard, mostly in ascending order; a `BytesAt`.

    Each call of `read` fetches a window of many pieces, from which the next pieces are taken.

    Args:
        read: reads bytes of the shard. Called with an offset, and the minimum and maximum number of
            bytes; returns fewer than the minimum only at the end of the shard.
        size_bytes: size of the shard.
        url: url of the shard, for errors.
    """

    def __init__(self, read: Read, size_bytes: int, url: str) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._url = url
        self._window = b""
        self._window_start = 0  # offset of the window in the shard

    def __call__(self, at: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from an offset on.

        Raises TruncatedShardError if the shard ends before the last of them, and any error of
        `read`.
        """
        begin = at - self._window_start
        # In a shard that is still arriving, `read` waits for the bytes. Even a call for 0 bytes may
        # lie beyond the window: it has to wait until the shard has arrived up to its offset.
        if begin < 0 or begin + size_bytes > len(self._window):
            max_bytes = max(size_bytes, _WINDOW_BYTES)
            self._window = self._read(at, size_bytes, max_bytes)
            self._window_start = at
            begin = 0
        data = self._window[begin : begin + size_bytes]
        if len(data) < size_bytes:
            raise TruncatedShardError(
                f"the file ends at byte {self._size_bytes}, inside the {size_bytes} bytes from "
                f"byte {at} on",
                url=self._url,
            )
        return data


def read_offsets(bytes_at: BytesAt, size_bytes: int, url: str) -> "array[int]":
    """Return the offsets of all samples, and of the byte after the last sample.

    Args:
        bytes_at: reads the shard.
        size_bytes: size of the whole shard.
        url: url of the shard, for errors.

    Raises CorruptShardError for offsets that are not ascending, or before the first possible
    sample; TruncatedShardError for offsets beyond the end of the file.
    """
    [count] = u32s(bytes_at(0, U32_BYTES))
    offsets_bytes = U32_BYTES * (count + 1)
    header_bytes = U32_BYTES + offsets_bytes
    if header_bytes > size_bytes:
        raise TruncatedShardError(
            f"the file has {size_bytes} bytes, too few for the offsets of {count:,} samples",
            url=url,
        )
    offsets = u32s(bytes_at(U32_BYTES, offsets_bytes))
    if offsets[0] < header_bytes:
        raise CorruptShardError(
            f"the first sample begins at byte {offsets[0]}, inside the offsets",
            url=url,
        )
    if offsets[-1] > size_bytes:
        raise TruncatedShardError(
            f"the file ends at byte {size_bytes}, but its last sample at byte {offsets[-1]}",
            url=url,
        )
    if not are_ascending(offsets):
        raise CorruptShardError("the offsets of its samples are not ascending", url=url)
    return offsets


def are_ascending(offsets: "array[int]") -> bool:
    """Return True if no offset is smaller than the offset before it."""
    nexts = islice(offsets, 1, None)
    return all(map(le, offsets, nexts))


def u32s(data: bytes) -> "array[int]":
    """Return the little-endian u32 numbers in some bytes."""
    numbers = array("I", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
