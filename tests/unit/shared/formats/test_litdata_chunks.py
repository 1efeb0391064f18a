"""LitData's chunks and their index.json, sound and damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import (
    ConfigError,
    CorruptShardError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats.chunks.litdata_chunks import LITDATA
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.formats.format_table import suffix_and_format
from shardcache.shared.tarindex.tables import Samples
from support import TESTS

DATA = TESTS / "data/formats/litdata"
URL = "s3://bucket/set/chunk-0-0.bin"
INDEX = json.loads((DATA / "plain/index.json").read_text())
CHUNK = (DATA / "plain/chunk-0-0.bin").read_bytes()
# Other names than those of the samples, as many as these have.
NAMES = [f"column {number}" for number in range(len(INDEX["config"]["data_format"]))]


def indexed(folder: Path, data: bytes, **config: Any) -> Samples:
    path = folder / "chunk"
    path.write_bytes(data)
    index = json.dumps({"config": INDEX["config"] | config}).encode()
    companion = LITDATA.companion_of(index, "s3://bucket/set/index.json")
    return LITDATA.index(path, URL, IndexOptions(companion=companion))


def test_columns_are_the_keys_of_the_samples(tmp_path: Path) -> None:
    """As the index.json spells them, with its names of types."""
    found = indexed(tmp_path, CHUNK)
    assert len(found) == 4
    assert found.extensions[0] == "Name"
    assert found.encodings == INDEX["config"]["data_format"]


@given(st.integers(0, len(CHUNK) - 1), st.integers(0, 255))
def test_changed_byte_never_leads_out_of_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    place: int,
    value: int,
) -> None:
    """A chunk with any byte changed is refused, or all of its leaves lie in it."""
    data = bytearray(CHUNK)
    data[place] = value
    try:
        found = indexed(tmp_path_factory.mktemp("litdata"), bytes(data))
    except ShardError as exn:
        assert exn.url == URL
        return
    assert max(found.ends, default=0) <= len(CHUNK)


@given(st.integers(0, len(CHUNK) - 1))
def test_every_cut_is_noticed(tmp_path_factory: pytest.TempPathFactory, size_bytes: int) -> None:
    """The last offset says where the chunk should end."""
    with pytest.raises((TruncatedShardError, CorruptShardError)):
        indexed(tmp_path_factory.mktemp("litdata"), CHUNK[:size_bytes])


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"item_loader": "TokensLoader"}, "TokensLoader"),
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"compression_level": "sample"}, "sample"),
    ],
)
def test_chunks_of_other_kinds_are_refused_by_name(
    tmp_path: Path,
    config: dict[str, Any],
    match: str,
) -> None:
    """By the index.json alone, and again by the chunk, if it was found without it."""
    with pytest.raises(UnsupportedShardError, match=match):
        indexed(tmp_path, CHUNK, **config)
    with pytest.raises(ValueError, match=match):
        LITDATA.listed_shards(INDEX | {"config": INDEX["config"] | config})


def test_description_without_types_is_refused(tmp_path: Path) -> None:
    """One that is cut off, say."""
    with pytest.raises(CorruptShardError, match="not lists"):
        indexed(tmp_path, CHUNK, data_format=None)


@pytest.mark.parametrize(
    ("type_", "context"),
    [
        ("builtins.dict", json.dumps(NAMES)),
        ("collections.OrderedDict", json.dumps(NAMES)),
        (
            "collections.defaultdict",
            {
                "default_factory_module": "builtins",
                "default_factory_name": "int",
                "dict_context": NAMES,
            },
        ),
    ],
)
def test_samples_of_any_dict_have_its_keys_as_columns(
    tmp_path: Path, type_: str, context: Any
) -> None:
    """The description is that of torch's `treespec_dumps`."""
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = [1, {"type": type_, "context": context, "children_spec": [leaf] * len(NAMES)}]
    assert indexed(tmp_path, CHUNK, data_spec=json.dumps(spec)).extensions == NAMES


def test_nested_samples_are_refused(tmp_path: Path) -> None:
    """A sample is a dict of values; one of dicts of dicts has no columns."""
    leaf = {"type": None, "context": None, "children_spec": []}
    inner = {"type": "builtins.dict", "context": '["x"]', "children_spec": [leaf]}
    spec = [1, {"type": "builtins.dict", "context": '["a"]', "children_spec": [inner]}]
    with pytest.raises(UnsupportedShardError, match="nested"):
        indexed(tmp_path, CHUNK, data_spec=json.dumps(spec))


@pytest.mark.parametrize(
    "spec",
    ["", "null", "[1, 2]", "[1, {}]", '{"type": "x"}', '[1, {"type": 5, "children_spec": []}]'],
)
def test_damaged_descriptions_are_refused(tmp_path: Path, spec: str) -> None:
    """The error names the index.json as what to look at."""
    with pytest.raises(CorruptShardError, match=r"index\.json"):
        indexed(tmp_path, CHUNK, data_spec=spec)


@pytest.mark.parametrize("name", ["chunk-0-0.bin", "chunk-12-3.zstd.bin", "a/chunk-0-1.zstd:4.bin"])
def test_chunks_are_recognised_by_their_names(name: str) -> None:
    """Among the many files that end in .bin."""
    found = suffix_and_format(name)
    assert found is not None
    assert found[1] is LITDATA


@pytest.mark.parametrize(
    "name", ["weights.bin", "chunk-0.bin", "chunk-0-0.bin.part", "xchunk-0-0.bin"]
)
def test_other_files_are_no_chunks(name: str) -> None:
    """Their names belong to no format."""
    assert suffix_and_format(name) is None


@pytest.mark.parametrize(
    "encoding", ["pickle", "graph", "video:mp4", "no_header_numpy:99", "no_header_tensor:x"]
)
def test_leaves_that_cannot_be_decoded_say_what_to_do(encoding: str) -> None:
    """Leave the leaf out, or take its bytes."""
    with pytest.raises((UnsupportedShardError, ConfigError)) as caught:
        LITDATA.decoder(encoding)
    assert "members=" in caught.value.remedy


def test_rows_in_place_of_a_chunk_are_refused(tmp_path: Path) -> None:
    """Only this program's own rows are read, as others may be compressed to any size."""
    path = tmp_path / "chunk-0-0.bin"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(CorruptShardError, match="not a chunk"):
        LITDATA.stored_copy(path, URL)
