"""`shardcache simulate --global-shuffle`: what can be computed by hand, and what it refuses."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shardcache.cli.main import app
from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef

KIB = 1024
SHARDS = 8
SAMPLES = 32
SAMPLE_BYTES = 64 * KIB
PART_BYTES = 128 * KIB
PAIRS = SAMPLES // 2  # parts of a shard, with two samples each
SHARD_BYTES = SAMPLES * SAMPLE_BYTES
WHOLE = SHARDS * SHARD_BYTES
EPOCHS = 3


def write_table(path: Path, samples: int = SAMPLES) -> None:
    """Write the table of samples of a size, one behind the other."""
    blocks = [SAMPLE_BYTES // 512] * samples
    with tarfile.open(path, "w") as table:
        for shard in range(SHARDS):
            keys = [f"{shard}-{number}" for number in range(samples)]
            row = {"shard": shard, "version": "v", "samples": samples, "first": 0, "keys": keys}
            data = json.dumps(row | {"sizes": {}, "first_block": 0, "blocks": blocks}).encode()
            member = tarfile.TarInfo(f"{shard}-0.json")
            member.size = len(data)
            table.addfile(member, io.BytesIO(data))


@pytest.fixture
def index(tmp_path: Path) -> Path:
    refs = [ShardRef(f"s3://b/{number}.tar", "v", SHARD_BYTES, SAMPLES) for number in range(SHARDS)]
    path = tmp_path / "index.json"
    path.write_text(shardlist.write(refs))
    write_table(path.with_suffix(".samples"))
    return path


def simulated(index: Path, *flags: str) -> Result:
    run = (
        "--global-shuffle",
        "--ranks",
        "2",
        "--epochs",
        str(EPOCHS),
        "--range-part-size",
        str(PART_BYTES),
    )
    return CliRunner().invoke(app, ["simulate", str(index), *run, *flags])


def ours(index: Path, *flags: str) -> dict[str, Any]:
    ran = simulated(index, *flags, "--json")
    assert ran.exit_code == 0, ran.output
    policy: dict[str, Any] = json.loads(ran.output)["policies"]["shardcache"]
    return policy


def test_a_disk_for_all_fetches_each_part_once(index: Path) -> None:
    """A part is a request; only the first of its samples waits for it."""
    found = ours(index, "--disk", "1GB", "--whole-from-percent", "100")
    assert found["store_bytes"] == WHOLE
    assert found["requests"] == SHARDS * PAIRS + SHARDS
    assert found["hits"] == 1 - SHARDS * PAIRS / (SHARDS * SAMPLES * EPOCHS)


def test_a_whole_shard_takes_fewer_requests_and_no_more_bytes(index: Path) -> None:
    """With the first part of a shard, or its second, the rest comes in a few requests."""
    found = ours(index, "--disk", "1GB", "--whole-from-percent", "1")
    assert found["store_bytes"] == WHOLE
    assert found["requests"] <= SHARDS * 4


def test_whole_shards_that_do_not_fit_are_read_by_parts(index: Path) -> None:
    """The disk is smaller than one of them."""
    disk = str(SHARD_BYTES // 2)
    assert ours(index, "--disk", disk, "--whole-from-percent", "1") == ours(index, "--disk", disk)


def test_a_disk_without_space_fetches_whole_parts_for_each_sample(index: Path) -> None:
    """Of two samples, one is needed: nearly every sample costs a part, twice its bytes."""
    found = ours(index, "--disk", "1MB", "--whole-from-percent", "100")
    assert 0.8 * 2 * WHOLE * EPOCHS < found["store_bytes"] <= 2 * WHOLE * EPOCHS


def test_without_a_cache_each_sample_is_fetched_by_its_range(index: Path) -> None:
    ran = simulated(index, "--disk", "1GB", "--json")
    alone = json.loads(ran.output)["policies"]["none"]
    assert alone["store_bytes"] == WHOLE * EPOCHS
    assert alone["requests"] == SHARDS * SAMPLES * EPOCHS


def test_jobs_share_the_parts_that_are_cached(index: Path) -> None:
    """Each has an order of its own."""
    flags = ("--disk", "1GB", "--jobs", "3")
    for spread in ((), ("--together",)):
        assert ours(index, *flags, *spread)["store_bytes"] == WHOLE


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (("--no-shuffle",), "permutes all samples"),
        (("--canonical-nodes", "2"), "permutes all samples"),
        (("--tier",), "--tier and --picture"),
        (("--picture", "hits.svg"), "--tier and --picture"),
    ],
)
def test_options_without_meaning_are_refused(
    index: Path, flags: tuple[str, ...], wrong: str
) -> None:
    ran = simulated(index, "--disk", "1GB", *flags)
    assert ran.exit_code == 2
    assert wrong in ran.output


def test_a_missing_table_and_one_of_other_samples_are_errors(index: Path) -> None:
    """Both say how to write it."""
    table = index.with_suffix(".samples")
    write_table(table, samples=SAMPLES - 1)
    other = simulated(index, "--disk", "1GB")
    table.unlink()
    missing = simulated(index, "--disk", "1GB")
    for ran, wrong in ((other, "does not match"), (missing, "cannot read the table")):
        assert ran.exit_code == 2
        assert wrong in ran.output
        assert "index.json --samples" in ran.output
