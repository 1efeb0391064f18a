"""Metadata of samples: read from one member each, kept in rows, found in entries."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ConfigError, MetadataError
from shardcache.shared.protocol import ShardRef
from shardcache.shared.tarindex.contents import (
    MAX_METADATA_BYTES,
    entries_of,
    read_metadata,
    rows_of,
)
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.named_members import MetadataMember
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.parts.sample_tables import select
from support.shards.tars import make_tar

URL = "s3://bucket/train-000000.tar"


def read(
    tmp_path: Path, members: list[dict[str, bytes]], member: str = "json"
) -> tuple[Any, list[Any]]:
    """Return the tables of a shard with these samples, and the metadata of each."""
    tar = make_tar({"__key__": str(number)} | sample for number, sample in enumerate(members))
    (tmp_path / "a.tar").write_bytes(tar)
    tables = index_tar(tmp_path / "a.tar", URL)
    return tables, list(read_metadata(tables, tar, MetadataMember.parse(member), URL))


@pytest.mark.parametrize(
    ("member", "kept"),
    [
        ("json", [{"a": 1, "b": [None, "é"]}, None, {}]),
        ("JSON:b,c", [{"b": [None, "é"]}, None, {}]),
    ],
    ids=["all of it", "some fields"],
)
def test_rows_keep_metadata_in_pieces(tmp_path: Path, member: str, kept: list[Any]) -> None:
    """An entry has the object or the named fields, and is empty without the member."""
    first = json.dumps({"a": 1, "b": [None, "é"]}).encode()
    tables, found = read(
        tmp_path, [{"jpg": b"1", "json": first}, {"jpg": b"2"}, {"json": b" {}\n"}] * 700, member
    )
    assert found == kept * 700
    rows = list(rows_of(tables, iter(found)))
    assert [len(row["keys"]) for row in rows] == [1000, 1000, 100]
    entries = [entry for row in rows for entry in entries_of(json.loads(json.dumps(row)), URL)]
    assert [entry.metadata for entry in entries] == [each or {} for each in kept] * 700
    assert pickle.loads(pickle.dumps(entries[:3])) == entries[:3]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"[1]", "a list, not an object"),
        (b"\xff{}", "'utf-8' codec"),
        (b"{}{}", "Extra data"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (b'{"a": "' + b"x" * MAX_METADATA_BYTES + b'"}', "16,392 bytes, more than 16,384"),
        (b" " * 1024 * 1024 + b"{}", "1,048,578 bytes, more than 1,048,576"),
    ],
    ids=[
        "nothing",
        "a list",
        "no text",
        "two objects",
        "too deep",
        "too much of it",
        "too large a member",
    ],
)
def test_member_without_metadata_is_an_error(tmp_path: Path, content: bytes, reason: str) -> None:
    """It names shard, member and sample, and the command that keeps less."""
    with pytest.raises(
        MetadataError, match="the member 'json' of the sample '1' holds no valid metadata"
    ) as caught:
        read(tmp_path, [{"json": b"{}"}, {"json": content}])
    assert reason in caught.value.message
    assert caught.value.url == URL
    assert "--metadata json:width,height" in caught.value.remedy


def test_fields_of_a_large_member_are_kept(tmp_path: Path) -> None:
    """The limit is for what the table keeps."""
    content = json.dumps({"text": "x" * 10 * MAX_METADATA_BYTES, "tokens": 7}).encode()
    assert read(tmp_path, [{"json": content}], "json:tokens")[1] == [{"tokens": 7}]


@pytest.mark.parametrize("metadata", [[{}], [{}, 1], [{}, {}, {}], None, {"a": 1}], ids=str)
def test_a_table_with_other_metadata_is_refused(tmp_path: Path, metadata: Any) -> None:
    """Fewer or more than there are samples, or no objects."""
    tables, found = read(tmp_path, [{"json": b'{"a": 1}'}] * 2)
    row = {"shard": 0, "version": "v", **next(rows_of(tables, iter(found)))}
    whole = Manifest.of([ShardRef(URL, "v", 1, 2)])
    assert select(whole, [("table", row)], lambda entry: entry.metadata["a"]) == (None,)
    with pytest.raises(ConfigError, match="the table of samples is invalid"):
        select(whole, [("table", row | {"metadata": metadata})], bool)


@pytest.mark.parametrize("text", ["", ".json", ":width"])
def test_a_member_has_an_extension(text: str) -> None:
    """An extension is written without its dot."""
    with pytest.raises(ConfigError, match="not a member extension"):
        MetadataMember.parse(text)
