"""Shards written to object stores by `shardcache write`."""

from pathlib import Path
from typing import Any

import pytest

from support.programs.cli import shardcache
from support.stores.buckets import Bucket, body_of, index_of
from support.stores.faulty_proxy import FaultyProxy
from support.stores.mischief import Mischief

MIB = 1024**2


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of a thousand lines."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(1000)))
    return path


def write(lines: Path, url: str, *flags: str, **env: str) -> Any:
    """Run the command with shards of a hundred lines; return how it ended."""
    return shardcache(
        "write", lines, url, "--shard-size", "104000", "--workers", "1", "--json", *flags, env=env
    )


@pytest.mark.slow
def test_shards_are_uploaded_and_resumed(moto: Bucket, lines: Path, tmp_path: Path) -> None:
    """The index names version and count; a rerun uploads what is missing or replaced."""
    url = f"{moto.url}/train"
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    ran = write(lines, url, "--workers", "2", TMPDIR=str(drafts))
    assert ran.code == 0, ran.err
    assert list(drafts.iterdir()) == [], ran.err
    assert ran.json["index"] == f"{url}/index.json"
    assert ran.json["shards"] == len(index_of(moto)) == 10
    moto.server.client.delete_object(Bucket=moto.name, Key="train/shard-000003.tar")
    moto.put("train/shard-000004.tar", bytes(len(body_of(moto, "train/shard-000004.tar"))))
    again = write(lines, url)
    assert again.code == 0
    assert again.json["written"] == 2
    assert again.json["kept"] == 8
    assert len(index_of(moto)) == 10
    lines.write_text("{}\n")
    assert "input:" in write(lines, url).err


@pytest.mark.slow
def test_an_upload_is_repeated_after_errors(moto: Bucket, lines: Path) -> None:
    """503, 500 and resets cost attempts, not shards."""
    with FaultyProxy(moto.server.endpoint_url) as proxy:
        for number, mischief in enumerate(
            (Mischief.SLOW_DOWN, Mischief.INTERNAL_ERROR, Mischief.RESET_AT_ONCE)
        ):
            proxy.fail(mischief, method="PUT", key=f"train/shard-{number:06d}.tar", times=2)
        ran = write(lines, f"{moto.url}/train", AWS_ENDPOINT_URL=proxy.endpoint_url)
        assert ran.code == 0, ran.err
        assert proxy.done.total() == 6
    assert len(index_of(moto)) == 10


def test_errors_of_a_destination_advise_its_writer(lines: Path) -> None:
    """The error names what this user needs, and says no word of a daemon."""
    nothing = {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    ran = write(lines, "s3://bucket/train", **nothing)
    assert "no usable credentials" in ran.err
    assert "AWS_PROFILE" in ran.err
    missing = write(lines, "oss://bucket/train")
    assert "pip install ossfs" in missing.err
    assert "daemon" not in ran.err + missing.err
