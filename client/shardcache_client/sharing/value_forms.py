"""The form of the values of each extension of a shard: copied bytes, or Buffers.

A value is one member of the tar, and its extension is the end of the member's name, such as `jpg`.
A Buffer is a view of the mapped shard without a copy. Small values are cheaper to copy, so the form
depends on the sizes of an extension's values.
"""

import enum
import mmap
from collections.abc import Collection

import numpy as np

from shardcache.shared.tarindex.tables import Tables
from shardcache_client.sharing.buffer import MIN_BUFFER_BYTES, Buffer


class Form(enum.Enum):
    """Type of the values of one extension throughout a shard.

    Attributes:
        BYTES: all values are `bytes`.
        VIEW: all values are Buffers.
        BY_SIZE: small values are `bytes`, large values are Buffers; see `ValuesBySize`.
    """

    BYTES = enum.auto()
    VIEW = enum.auto()
    BY_SIZE = enum.auto()


def forms_of(tables: Tables, extensions: Collection[str] | None) -> list[Form]:
    """Return the form of each extension of a shard.

    Args:
        tables: the shard's index.
        extensions: extensions whose values may be Buffers; None for all.
    """
    # The number of each value's extension, and the value's size.
    extension_ids = np.asarray(tables.extension_ids)
    sizes_bytes = np.asarray(tables.ends) - np.asarray(tables.starts)
    # For each extension, how many of its values are small, and how many are large.
    is_small = sizes_bytes < MIN_BUFFER_BYTES
    extensions_count = len(tables.extensions)
    small = np.bincount(extension_ids, weights=is_small, minlength=extensions_count)
    large = np.bincount(extension_ids, weights=~is_small, minlength=extensions_count)

    forms = []
    for number, extension in enumerate(tables.extensions):
        may_be_view = extensions is None or extension in extensions
        if not large[number] or not may_be_view:
            forms.append(Form.BYTES)
        elif small[number]:
            forms.append(Form.BY_SIZE)
        else:
            forms.append(Form.VIEW)
    return forms


class ValuesBySize:
    """Slices a mapped shard: small runs become `bytes`, larger runs become Buffers.

    This is slower than the other forms, which slice without a call of Python code for each run.

    Args:
        mapped: the map of the shard, which is sliced to `bytes`.
        whole: a Buffer of the same bytes, which is sliced to Buffers.
    """

    def __init__(self, mapped: mmap.mmap, whole: Buffer) -> None:
        self._map = mapped
        self._whole = whole

    def __getitem__(self, run: slice) -> bytes | Buffer:
        """Return the value of a run of bytes; the slice must have start and stop."""
        if run.stop - run.start < MIN_BUFFER_BYTES:
            return self._map[run]
        return self._whole[run]  # type: ignore[return-value]
