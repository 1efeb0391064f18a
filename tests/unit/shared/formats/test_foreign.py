"""Files of formats that are not read: the error says which one it is, and what to do."""

from pathlib import Path

import pytest

from shardcache.errors import NotATarError
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.formats.format_table import format_of

URL = "s3://bucket/shard.tar"
FILES = {
    "a zip": (b"PK\3\4", ".zip"),
    "a parquet file": (b"PAR1", ".parquet"),
    "an Arrow file": (b"ARROW1\0\0", "parquet"),
    "an HDF5 file": (b"\x89HDF\r\n\x1a\n", "`shardcache.writing.ShardWriter`"),
    "an LMDB database": (bytes(16) + b"\xde\xc0\xef\xbe", "ShardWriter"),
    "a web page": (b"<!DOCTYPE html>", "url"),
}


@pytest.mark.parametrize("what", FILES)
def test_file_of_another_format_is_named(tmp_path: Path, what: str) -> None:
    """Whole, and while it arrives."""
    magic, remedy = FILES[what]
    data = magic.ljust(2000, b"x")
    path = tmp_path / "shard"
    path.write_bytes(data)
    with pytest.raises(NotATarError, match=f"not a tar but {what}") as caught:
        format_of(URL).index(path, URL, IndexOptions())
    assert remedy in caught.value.remedy
    assert caught.value.url == URL

    walk = format_of(URL).walk(lambda at, _min, most: data[at : at + most], len(data), URL)
    with pytest.raises(NotATarError, match=f"not a tar but {what}"):
        walk.advance()


def test_unknown_bytes_stay_what_they_are(tmp_path: Path) -> None:
    """The error shows the first of them."""
    path = tmp_path / "shard"
    path.write_bytes(b"?" * 2000)
    with pytest.raises(NotATarError, match=r"begins with b'\?"):
        format_of(URL).index(path, URL, IndexOptions())
