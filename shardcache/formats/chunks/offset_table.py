"""The beginning that MDS shards and LitData chunks share: a count and the offsets of samples.

count       u32
offsets     u32[count + 1], of each sample and behind the last one
"""

import sys
from array import array
from collections.abc import Callable
from itertools import islice
from operator import le

from shardcache.errors import CorruptShardError, TruncatedShardError
from shardcache.tarindex.members import Read

U32_BYTES = 4
_WINDOW_BYTES = 64 * 1024

BytesAt = Callable[[int, int], bytes]
"""Returns exactly as many bytes of a shard, from an offset on, as asked for."""


class ForwardReader:
    """Small reads that go forward through a shard, several of them by one call of `read`.

    Raises TruncatedShardError where the shard ends, and what `read` raises.
    """

    def __init__(self, read: Read, size_bytes: int, url: str) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._url = url
        self._window = b""
        self._start = 0  # offset of the window

    def __call__(self, at: int, size_bytes: int) -> bytes:
        """Return bytes from an offset on. Those before it may be gone."""
        begin = at - self._start
        # `read` is called for no bytes beyond the window, too: it waits until an arriving shard has
        # arrived up to there.
        if begin < 0 or begin + size_bytes > len(self._window):
            max_bytes = max(size_bytes, _WINDOW_BYTES)
            self._window = self._read(at, size_bytes, max_bytes)
            self._start = at
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
    """Return the offsets of all samples, and behind the last one.

    Args:
        bytes_at: reads the shard.
        size_bytes: of the whole shard.
        url: for errors.

    Raises TruncatedShardError, CorruptShardError for offsets that are not in order, or not in the
    file.
    """
    [count] = u32s(bytes_at(0, U32_BYTES))
    header_bytes = U32_BYTES * (count + 2)
    if header_bytes > size_bytes:
        raise TruncatedShardError(
            f"the file has {size_bytes} bytes, too few for the offsets of {count:,} samples",
            url=url,
        )
    offsets = u32s(bytes_at(U32_BYTES, header_bytes - U32_BYTES))
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
    """Return whether no offset is smaller than the one before it."""
    nexts = islice(offsets, 1, None)
    return all(map(le, offsets, nexts))


def u32s(data: bytes) -> "array[int]":
    """Return little-endian numbers."""
    numbers = array("I", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def key_of_number(number: int) -> bytes:
    """Return the key of a sample in a format without keys: its number in the shard."""
    return b"%08d" % number
