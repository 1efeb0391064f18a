"""folder_format.py: a cache folder says in which format it is, and a release uses only what it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.errors import CacheFormatError
from shardcache.store.folder import FORMAT
from support.shards.stores import open_store, publish

URL = "s3://bucket/a.tar"


async def test_a_folder_without_a_number_is_taken_over_with_its_shards(tmp_path: Path) -> None:
    """A folder of a release that wrote no number has its shards served, and is numbered from then on."""
    store = open_store(tmp_path)
    shard = await publish(store, URL)
    store.close()
    (tmp_path / "format").unlink()
    taken_over = open_store(tmp_path)
    assert [(await taken_over.facts(found)).url for found in taken_over.shards.values()] == [URL]
    assert shard.key in taken_over.shards
    assert (tmp_path / "format").read_text() == f"{FORMAT}\n"
    taken_over.close()


def test_a_newer_folder_is_left_alone(tmp_path: Path) -> None:
    """The error names both formats and what to do; nothing has been made or removed."""
    (tmp_path / "format").write_text(f"{FORMAT + 1}\n")
    with pytest.raises(CacheFormatError, match=f"has format {FORMAT + 1}.* formats up to {FORMAT}") as caught:
        open_store(tmp_path)
    assert "newer release" in caught.value.remedy and "--cache-dir" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["format"]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe"])
def test_folder_with_an_unreadable_format_is_refused(tmp_path: Path, content: bytes) -> None:
    """A folder that is perhaps no cache at all is not written to."""
    (tmp_path / "format").write_bytes(content)
    with pytest.raises(CacheFormatError, match="does not contain a number"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["format"]


def test_a_half_written_number_is_swept_away(tmp_path: Path) -> None:
    """A kill before the rename leaves no trace, and the folder as it was."""
    open_store(tmp_path).close()
    (tmp_path / "format").rename(tmp_path / "partial" / "format")
    open_store(tmp_path).close()
    assert (tmp_path / "format").exists() and not (tmp_path / "partial" / "format").exists()
