"""Types of options that are sizes: on disk, in memory, of a part, or per second."""

from dataclasses import dataclass
from typing import Annotated

import pydantic
from pydantic import AfterValidator, BeforeValidator, ByteSize

from shardcache.shared.units import size

MIB = 1024 * 1024

# Minimum capacity of a cache: the files that belong to the smallest shard (sidecar, journal and
# index) take this space.
MIN_CAPACITY_BYTES = 64 * 1024
_BLOCK_BYTES = 4096  # size of a disk's block
_BYTE_SIZE = pydantic.TypeAdapter(ByteSize)  # parses texts such as 200GB


@dataclass(frozen=True, slots=True)
class DiskAmount:
    """A size on disk: a number of bytes, or a fraction of the filesystem that holds the cache.

    Attributes:
        value_bytes: number of bytes; ignored if there is a fraction.
        fraction: fraction of the filesystem, from 0 to 1; None for a number of bytes.
    """

    value_bytes: int = 0
    fraction: float | None = None

    @classmethod
    def parse(cls, value: object) -> "DiskAmount":
        """Parse `200GB`, `1.5TiB`, `80%` or a plain number of bytes. Raises ValueError.

        A DiskAmount is returned unchanged.
        """
        if isinstance(value, DiskAmount):
            return value
        if isinstance(value, str) and value.strip().endswith("%"):
            percent = float(value.strip().removesuffix("%"))
            if not 0 <= percent <= 100:
                raise ValueError("a percentage must be between 0% and 100%")
            return cls(fraction=percent / 100)
        return cls(value_bytes=int(_BYTE_SIZE.validate_python(value)))

    def of(self, filesystem_bytes: int) -> int:
        """Return the amount in bytes on a filesystem of the given size."""
        if self.fraction is None:
            return self.value_bytes
        return int(filesystem_bytes * self.fraction)

    def excess_warning(self, filesystem_bytes: int) -> str | None:
        """Return a warning if the amount exceeds the size of the filesystem; None otherwise."""
        if self.of(filesystem_bytes) <= filesystem_bytes:
            return None
        capacity = size(self.value_bytes)
        filesystem = size(filesystem_bytes)
        return f"the capacity of {capacity} exceeds the size of its filesystem ({filesystem})"


def _checked_capacity(capacity: DiskAmount) -> DiskAmount:
    """Return the capacity unchanged. Raises ValueError if it cannot hold a shard.

    A user who forgets the unit, and writes 500 instead of 500GB, gets this error.
    """
    if capacity.fraction is None:
        is_too_small = capacity.value_bytes < MIN_CAPACITY_BYTES
    else:
        is_too_small = capacity.fraction == 0
    if is_too_small:
        amount = size(capacity.value_bytes)
        raise ValueError(f"{amount} cannot hold a single shard; add a unit, such as 500GB or 80%")
    return capacity


Size = Annotated[DiskAmount, BeforeValidator(DiskAmount.parse)]
"""A size on disk."""

Capacity = Annotated[Size, AfterValidator(_checked_capacity)]
"""A size on disk that is large enough for a shard."""


def _whole_blocks(value: ByteSize) -> ByteSize:
    """Round to the nearest whole number of disk blocks, so that 8MB can be used as well as 8MiB."""
    blocks = (value + _BLOCK_BYTES // 2) // _BLOCK_BYTES
    return ByteSize(blocks * _BLOCK_BYTES)


def _without_per_second(value: object) -> object:
    """Return `500MB` for the text `500MB/s`, and any other value unchanged."""
    if not isinstance(value, str):
        return value
    return value.strip().removesuffix("/s")


PartSize = Annotated[ByteSize, AfterValidator(_whole_blocks)]
"""A number of bytes, rounded to whole blocks of the disk."""

Rate = BeforeValidator(_without_per_second)
"""Validator of an option in bytes per second: `500MB/s` means the same as `500MB`."""
