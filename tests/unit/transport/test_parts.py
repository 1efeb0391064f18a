"""Parts of a file: where their bytes land, and which checksums they have."""

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from awscrt import checksums
from hypothesis import given
from hypothesis import strategies as st

from shardcache.transport.between.parts import RECORD, Parts, PartSums, write_parts, writing

DATA = random.Random(5).randbytes(100_000)
CRC: dict[str | None, Callable[[bytes], int]] = {
    None: lambda data: 0,
    "crc32c": checksums.crc32c,
    "crc32": zlib.crc32,
    "crc64nvme": checksums.crc64nvme,
}


def expected(data: bytes, part_bytes: int, algorithm: str | None, first: int = 0) -> list[PartSums]:
    """Return the checksums of consecutive parts, by the reference implementations."""
    pieces = [data[at : at + part_bytes] for at in range(0, len(data), part_bytes)]
    return [
        PartSums(first + index, checksums.crc32c(piece), CRC[algorithm](piece))
        for index, piece in enumerate(pieces)
    ]


@pytest.mark.parametrize("algorithm", CRC)
@pytest.mark.parametrize("part_bytes", [len(DATA), 32_768, 32_769])
def test_each_part_has_its_own_checksums(
    part_bytes: int, algorithm: str | None, tmp_path: Path
) -> None:
    """CRC32C and the store's own checksum are there; the last part may be shorter."""
    path = tmp_path / "a.part"
    path.write_bytes(bytes(len(DATA)))
    sums = write_parts(Parts(str(path), None, part_bytes, 0, len(DATA), algorithm), DATA)
    assert sums == expected(DATA, part_bytes, algorithm)
    assert path.read_bytes() == DATA


def test_parts_in_the_middle_of_a_file_have_their_own_numbers(tmp_path: Path) -> None:
    """Nothing before or behind them is touched; the journal goes on where it was."""
    path = tmp_path / "a.part"
    journal = tmp_path / "a.journal"
    path.write_bytes(b"x" * 100)
    journal.write_bytes(b"a title\n")
    sums = write_parts(Parts(str(path), str(journal), 10, 20, 25), DATA[:25])
    assert sums == expected(DATA[:25], 10, None, first=2)
    assert path.read_bytes() == b"x" * 20 + DATA[:25] + b"x" * 55
    assert journal.read_bytes() == b"a title\n" + b"".join(
        RECORD.pack(part.index, part.crc32c) for part in sums
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 50))
def test_parts_are_independent_of_the_pieces_in_which_a_body_comes(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], part_bytes: int
) -> None:
    """Parts begin and end where they do, and are finished with their last byte."""
    data = DATA[: sum(pieces)]
    path = tmp_path_factory.mktemp("parts") / "a.part"
    path.touch()
    at = 0
    with writing(Parts(str(path), None, part_bytes, 0, len(data), "crc32")) as writer:
        for size in pieces:
            writer.write(memoryview(data)[at : at + size])
            at += size
            assert len(writer.finished) == (
                at // part_bytes if at < len(data) else -(-at // part_bytes)
            )
    assert writer.finished == expected(data, part_bytes, "crc32")
    assert path.read_bytes() == data


def writes() -> int:
    """Return how many write calls this thread has made."""
    counts = dict(
        line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines()
    )
    return int(counts["syscw"])


def test_large_bodies_are_written_in_small_pieces(tmp_path: Path) -> None:
    """No write is larger than 256 KiB, since four such writes are quicker than one."""
    path = tmp_path / "a.part"
    data = DATA[:65_536] * 32
    path.write_bytes(bytes(len(data)))
    before = writes()
    write_parts(Parts(str(path), None, len(data), 0, len(data)), data)
    assert writes() - before == len(data) // 262_144
    assert path.read_bytes() == data
