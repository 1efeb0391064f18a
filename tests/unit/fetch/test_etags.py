"""Meaning of a difference between bytes and ETag, from store to store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.errors import CorruptShardError
from shardcache.fetch.verification import Etags
from shardcache.origin.base import MD5, Checksum, RemoteObject
from support.programs.guard import GUARD_S

DATA = b"some shard"
DIGEST = 0xE7B9F083B0A5CFD1BF090A8654A00825


def obj(name: str = "a.tar", *, etag: int = 5, bucket: str = "bucket") -> RemoteObject:
    """Return an object of which the ETag is all that is known."""
    return RemoteObject(f"s3://{bucket}/{name}", f"{etag:032x}", len(DATA), Checksum(MD5, etag))


def test_where_one_etag_was_right_another_that_differs_is_damage() -> None:
    """Every time, however often the same bytes come."""
    etags = Etags()
    etags.judge(obj(), 5, 5)
    for _ in range(3):
        with pytest.raises(CorruptShardError, match="MD5"):
            etags.judge(obj("b.tar"), 5, 6)


def test_the_same_bytes_twice_mean_that_the_etag_is_no_md5() -> None:
    """Where none ever was right: then it is compared no more, and the object served."""
    etags = Etags()
    with pytest.raises(CorruptShardError, match="verify_etag = false"):
        etags.judge(obj(), 5, 6)
    etags.judge(obj(), 5, 6)
    assert repr(etags) == "<Etags MD5 at [], something else at ['s3://bucket']>"


def test_a_training_process_gets_log_lines_by_logging_alone() -> None:
    """Nothing goes to its stdout, where its own output is: a program may pipe that to another one."""
    script = (
        "import contextlib, test_etags\n"
        "from shardcache.errors import CorruptShardError\n"
        "etags = test_etags.Etags()\n"
        "with contextlib.suppress(CorruptShardError):\n"
        "    etags.judge(test_etags.obj(), 5, 6)\n"
        "etags.judge(test_etags.obj(), 5, 6)\n"
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


def test_another_version_begins_anew() -> None:
    """Bytes of one version say nothing of the next one's."""
    etags = Etags()
    for version in (5, 6):
        with pytest.raises(CorruptShardError):
            etags.judge(obj(etag=version), version, 7)


async def test_a_store_whose_etags_are_something_else_costs_no_reading(tmp_path: Path) -> None:
    """Once that is known, files there are not read again, and those of other stores are."""
    etags = Etags()
    with pytest.raises(CorruptShardError):
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
