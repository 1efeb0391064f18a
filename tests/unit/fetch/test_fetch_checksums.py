"""Checksums of wholes from those of their parts."""

from __future__ import annotations

import zlib

import pytest
from awscrt import checksums
from hypothesis import given
from hypothesis import strategies as st

from shardcache.checksums import ALGORITHMS, combined

WHOLE = {"crc32c": checksums.crc32c, "crc32": zlib.crc32, "crc64nvme": checksums.crc64nvme}


@pytest.mark.parametrize("algorithm", WHOLE)
@given(data=st.binary(max_size=200), part_bytes=st.integers(1, 64))
def test_the_whole_follows_from_its_parts(algorithm: str, data: bytes, part_bytes: int) -> None:
    """However the bytes are cut into parts, the checksum is that of all of them in one."""
    parts = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    sums = [ALGORITHMS[algorithm](part, 0) for part in parts]
    assert combined(algorithm, sums, part_bytes, len(data)) == WHOLE[algorithm](data)


def test_the_algorithms_are_the_standard_ones() -> None:
    """Known answers for "123456789", from the CRC catalogue."""
    known = {"crc32c": 0xE3069283, "crc32": 0xCBF43926, "crc64nvme": 0xAE8B14860A799888}
    assert {name: ALGORITHMS[name](b"56789", ALGORITHMS[name](b"1234", 0)) for name in known} == known
