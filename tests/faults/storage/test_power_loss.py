"""The power is cut in a sample of all places: `make faults` does it after every call."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from campaign import power
from campaign.harness import Result, Row, rows
from campaign.lives import Ground
from campaign.power import BLOCK_BYTES, Chance, Disk, File
from support.disks.shim import HAS_CC, Call, Op


@rows(power.ROWS)
def test_power_cut_leaves_only_right_shards_visible(row: Row, lived: Ground) -> None:
    """Whatever of the unflushed reached the disk: shards that are visible are right, flushed ones are there."""
    row.check(lived)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CC, reason="the shim needs a C compiler")
@pytest.mark.parametrize("suffix", [".part", ".idx"])
def test_missing_flush_would_be_noticed(suffix: str, lived: Ground, tmp_path: Path) -> None:
    """Were tars or sidecars not flushed before their names, some state would show it: the test can fail."""
    story, result = lived.stories["fetch"], Result("a power cut without a flush")
    record = power.Record.of(lived.zygote, story, tmp_path / "p")
    careless = [call for call in record.calls if not (call.op is Op.FSYNC and call.path.endswith(suffix))]
    power.examine(lived.zygote, story, replace(record, calls=careless), result, step=37, daemons=0)
    assert result.wrong


def chance(seed: int) -> Chance:
    """Return one way in which a power cut may go."""
    return Chance(random.Random(seed))


def test_flushed_bytes_last_and_others_may_not() -> None:
    """In the model of a file, a block has any of its contents since the last flush, and a flushed one no other."""
    file = File()
    file.write(0, b"a" * BLOCK_BYTES)
    file.flush()
    file.write(BLOCK_BYTES - 1, b"bb")
    states = {file.after(chance(seed)) for seed in range(200)}
    assert {len(state) for state in states} == {BLOCK_BYTES, BLOCK_BYTES + 1}
    assert b"a" * BLOCK_BYTES in states
    assert b"a" * (BLOCK_BYTES - 1) + b"bb" in states
    assert all(state[:16] == b"a" * 16 or state[0] != ord("a") for state in states)
    file.flush()
    assert {file.after(chance(seed)) for seed in range(50)} == {b"a" * (BLOCK_BYTES - 1) + b"bb"}


def test_rename_may_be_seen_at_either_end_until_the_folder_is_flushed(tmp_path: Path) -> None:
    """In the model of a folder, each name leads to any of what it led to since the last flush."""
    (tmp_path / "old").write_bytes(b"x")
    (tmp_path / "f").mkdir()
    disk = Disk(tmp_path)
    disk.do(Call(Op.RENAME, f"{tmp_path}/old", f"{tmp_path}/f/new", 0, 0, 0, b""))
    seen = {frozenset(disk.after(chance(seed))) for seed in range(100)}
    assert seen == {frozenset({"old"}), frozenset({"f/new"}), frozenset({"old", "f/new"}), frozenset()}
    disk.do(Call(Op.FSYNC, f"{tmp_path}/f", "", 0, 0, 0, b""))
    assert all("f/new" in disk.after(chance(seed)) for seed in range(100))
    assert set(disk.certain()) == {"f/new"}
