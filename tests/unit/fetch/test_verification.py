"""Checksums of wholes from those of their parts, and what is learnt of ETags."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from awscrt import checksums
from hypothesis import given
from hypothesis import strategies as st

from shardcache.checksums import ALGORITHMS, combined
from shardcache.errors import CorruptShardError
from shardcache.fetch.download import Etags
from shardcache.origin.base import MD5, Checksum, RemoteObject
from support.programs.guard import GUARD_S

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


DATA = b"some shard"
DIGEST = 0xE7B9F083B0A5CFD1BF090A8654A00825


def obj(name: str = "a.tar", *, etag: int = 5, bucket: str = "bucket") -> RemoteObject:
    """Return an object of which the ETag is all that is known."""
    return RemoteObject(f"s3://{bucket}/{name}", f"{etag:032x}", len(DATA), Checksum(MD5, etag))


def test_a_differing_etag_is_damage_where_another_was_an_md5() -> None:
    """Every time, however often the same bytes come."""
    etags = Etags()
    etags.judge(obj(), 5, 5)
    for _ in range(3):
        with pytest.raises(CorruptShardError, match="MD5"):
            etags.judge(obj("b.tar"), 5, 6)


def test_a_training_process_gets_log_lines_by_logging_alone() -> None:
    """Nothing goes to its stdout, where its own output is: a program may pipe that to another one."""
    script = (
        "import contextlib, test_verification\n"
        "from shardcache.errors import CorruptShardError\n"
        "etags = test_verification.Etags()\n"
        "with contextlib.suppress(CorruptShardError):\n"
        "    etags.judge(test_verification.obj(), 5, 6)\n"
        "etags.judge(test_verification.obj(), 5, 6)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2])))}
    ran = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=GUARD_S)
    assert ran.stdout == ""
    assert ran.stderr == "the origin's ETags are not MD5s; no longer comparing them (origin=s3://bucket)\n"


def test_other_bytes_the_second_time_are_damage() -> None:
    """Something changes them on the way, whatever the ETag is."""
    etags = Etags()
    for found in (6, 7, 8):
        with pytest.raises(CorruptShardError):
            etags.judge(obj(), 5, found)


def test_another_version_starts_over() -> None:
    """Bytes of one version say nothing of the next one's."""
    etags = Etags()
    for version in (5, 6):
        with pytest.raises(CorruptShardError):
            etags.judge(obj(etag=version), version, 7)


async def test_a_store_whose_etags_are_something_else_costs_no_reading(tmp_path: Path) -> None:
    """Once that is known, files there are not read again, and those of other stores are."""
    etags = Etags()
    with pytest.raises(CorruptShardError, match="verify_etag = false"):
        etags.judge(obj(), 5, 6)
    etags.judge(obj(), 5, 6)
    await etags.verify(obj("b.tar"), tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        await etags.verify(obj(bucket="other"), tmp_path / "missing")


async def test_the_bytes_of_the_file_are_what_counts(tmp_path: Path) -> None:
    """The digest is that of the whole file; an object with a real checksum, or none, is left alone."""
    etags, path = Etags(), tmp_path / "a.part"
    path.write_bytes(DATA)
    with pytest.raises(CorruptShardError, match=f"{DIGEST:032x}"):
        await etags.verify(obj(), path)
    await etags.verify(obj(etag=DIGEST), path)
    path.write_bytes(DATA[::-1])
    for checksum in (None, Checksum("crc32", DIGEST)):
        await etags.verify(RemoteObject("s3://bucket/a.tar", "1", len(DATA), checksum), path)
    with pytest.raises(CorruptShardError):
        await etags.verify(obj(etag=DIGEST), path)
