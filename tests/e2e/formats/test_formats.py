"""Shards of other formats, as their own libraries wrote them: the same values in any order."""

import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardcache.errors import DecodeError, NotFoundError, UnsupportedShardError
from shardcache_client import ShardReader
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from support import TESTS
from support.programs import cli
from support.programs.daemon import Daemon
from support.shards.described import describe
from support.shards.tars import write_indexed
from support.stores.buckets import Bucket

DATA = TESTS / "data/formats"
SAMPLES = 11
FORMATS = ["mds", "litdata"]

LEAF = {"type": None, "context": None, "children_spec": []}
"""A leaf of a sample as LitData's `data_spec` describes it."""

one = pytest.mark.parametrize("kind", ["mds", pytest.param("litdata", marks=pytest.mark.slow)])
"""For what comes after the format: quick for one of them."""


def values(kind: str) -> list[dict[str, Any]]:
    """Return what the format's own library gives for each sample of its plain set."""
    found: list[dict[str, Any]] = json.loads((DATA / kind / "values.json").read_text())
    return found


def described(samples: Any) -> list[dict[str, Any]]:
    """Return samples without their keys and urls, in the same form."""
    return [
        {name: describe(value) for name, value in each.items() if not name.startswith("__")}
        for each in samples
    ]


def folder(kind: str, name: str = "plain") -> str:
    return f"file://{DATA}/{kind}/{name}/"


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("url", ["", "index.json"])
def test_values_are_those_of_the_formats_own_library(daemon: Daemon, kind: str, url: str) -> None:
    """The folder, or its index.json: every column of every sample has the same type and value."""
    dataset = ShardDataset(folder(kind) + url, shuffle=False, socket=daemon.socket)
    assert len(dataset) == SAMPLES
    assert described(dataset) == values(kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_samples_are_read_by_number(daemon: Daemon, kind: str) -> None:
    """Without an index of ours: the format counts its own samples."""
    with ShardDataset(folder(kind), socket=daemon.socket).indexed() as samples:
        assert described([samples[7], samples[2]]) == [values(kind)[7], values(kind)[2]]


@pytest.mark.parametrize("kind", FORMATS)
def test_shards_need_no_index_where_they_are_named(daemon: Daemon, kind: str) -> None:
    """A glob of the shards themselves, read by a plain reader."""
    pattern = {"mds": "*.mds", "litdata": "chunk-*.bin"}[kind]
    reader = ShardReader(folder(kind) + pattern, socket=daemon.socket)
    assert described(reader) == values(kind)


@pytest.mark.slow
@one
def test_folder_in_a_bucket_is_read_from_the_first_epoch_on(
    tmp_path_factory: pytest.TempPathFactory,
    moto: Bucket,
    kind: str,
) -> None:
    """Nothing is cached: shards of MDS are read while they arrive, chunks once they have."""
    for path in sorted((DATA / kind / "plain").iterdir()):
        moto.put(f"set/{path.name}", path.read_bytes())
    with Daemon(tmp_path_factory.mktemp("d"), env=moto.env()) as own:
        dataset = ShardDataset(f"{moto.url}/set/", shuffle=False, socket=own.socket)
        assert len(dataset) == SAMPLES
        assert described(dataset) == values(kind)


@pytest.mark.parametrize("compression", ["zstd", "gz", "bz2", "br", "snappy"])
def test_compressed_mds_shards_are_inflated(daemon: Daemon, compression: str) -> None:
    """Each compression that MDS has; two of them need a library."""
    if compression in ("br", "snappy"):
        pytest.importorskip({"br": "brotli", "snappy": "cramjam"}[compression])
    reader = ShardReader(folder("mds", compression), socket=daemon.socket)
    assert [sample["n"] for sample in reader] == list(range(SAMPLES))


@pytest.mark.slow
def test_chunks_of_rows_have_the_rows_values(daemon: Daemon) -> None:
    """Texts, numbers and nested values, which LitData stores in Arrow's format."""
    expected = json.loads((DATA / "litdata/rows_values.json").read_text())
    assert described(ShardReader(folder("litdata", "rows"), socket=daemon.socket)) == expected


def test_compressed_chunks_are_inflated(daemon: Daemon) -> None:
    """Items of a tuple are named by their numbers."""
    for name in ("tuples", "zstd"):
        reader = ShardReader(folder("litdata", name), socket=daemon.socket)
        found = [(sample["0"], sample["1"]) for sample in reader]
        assert found == [(number, bytes([number])) for number in range(SAMPLES)]


def test_chunks_of_compressed_frames_are_inflated(daemon: Daemon) -> None:
    """LitData compresses some hundred samples at once, unless it is told otherwise."""
    reader = ShardReader(folder("litdata", "framed"), socket=daemon.socket)
    assert [(sample["n"], *sample["v"]) for sample in reader] == [
        (nth, nth, nth, nth) for nth in range(SAMPLES)
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_pickled_columns_are_refused_by_name(daemon: Daemon, kind: str) -> None:
    """No code from a shard runs; without the column, the others are read."""
    url = folder(kind, "pickled")
    with pytest.raises(UnsupportedShardError, match=r"'bad'.*pickled") as caught:
        list(ShardReader(url, socket=daemon.socket))
    assert "members=" in caught.value.remedy

    reader = ShardReader(url, socket=daemon.socket, members=["n"])
    assert [sample["n"] for sample in reader] == [0, 1, 2]


@pytest.mark.parametrize("kind", FORMATS)
def test_named_decoders_get_the_bytes_of_a_column(daemon: Daemon, kind: str) -> None:
    """Columns are named in any case; the others keep their values."""
    reader = ShardReader(
        folder(kind),
        socket=daemon.socket,
        members=["name", "count"],
        decode={"NAME": bytes},
    )
    first = next(iter(reader))
    assert first["Name"] == "sämple 0".encode()
    assert first["count"] == 0
    assert "data" not in first


def write_typed_set(kind: str, columns: dict[str, tuple[str, bytes]], folder: Path) -> str:
    """Write a set of one sample, whose columns have an encoding and bytes each; return its url."""
    names = list(columns)
    encodings = [encoding for encoding, _ in columns.values()]
    cells = [cell for _, cell in columns.values()]
    lists = {
        "column_names": names,
        "column_encodings": encodings,
        "column_sizes": [None] * len(names),
    }
    config = {"format": "mds", "version": 2, "compression": None, **lists}
    head = json.dumps(config).encode() if kind == "mds" else b""
    body = struct.pack(f"<{len(cells)}I", *map(len, cells)) + b"".join(cells)
    start = 12 + len(head)  # after the number of samples, 1, and the start and end of that sample
    shard = struct.pack("<3I", 1, start, start + len(body)) + head + body
    if kind == "mds":
        (folder / "0.mds").write_bytes(shard)
        return f"file://{folder}/0.mds"
    index = json.loads((DATA / "litdata/plain/index.json").read_text())
    spec = {
        "type": "builtins.dict",
        "context": json.dumps(names),
        "children_spec": [LEAF] * len(names),
    }
    index["config"] |= {"data_format": encodings, "data_spec": json.dumps([1, spec])}
    index["chunks"] = [
        {"chunk_bytes": len(shard), "chunk_size": 1, "dim": None, "filename": "chunk-0-0.bin"}
    ]
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "chunk-0-0.bin").write_bytes(shard)
    return f"file://{folder}/"


@pytest.mark.parametrize("kind", FORMATS)
def test_decoders_by_extension_get_bytes_and_images(
    daemon: Daemon, tmp_path: Path, kind: str
) -> None:
    """Numbers, texts and arrays are values already, whatever the name of their column."""
    file = io.BytesIO()
    Image.new("RGB", (6, 4), "red").save(file, "JPEG")
    columns = {
        "cls": ("int", struct.pack("<q", 5)),
        "cls2": ("bytes", b"7"),
        "jpg": ("jpeg", file.getvalue()),
        "json": ("str", b"[1]"),
        "npy": ({"mds": "ndarray:uint8:3", "litdata": "no_header_numpy:4"}[kind], b"123"),
    }
    url = write_typed_set(kind, columns, tmp_path)
    (found,) = described(ShardReader(url, socket=daemon.socket, decode="rgb8"))
    pixels = np.asarray(Image.open(file))
    values = {
        "cls": 5,
        "cls2": 7,
        "jpg": pixels,
        "json": "[1]",
        "npy": np.frombuffer(b"123", np.uint8),
    }
    assert found == {name: describe(value) for name, value in values.items()}


@one
def test_each_sample_is_read_once_by_all_ranks_and_workers(daemon: Daemon, kind: str) -> None:
    """Two ranks with two workers each; the numbers in `count` tell the samples apart."""
    seen = []
    for rank in range(2):
        dataset = ShardDataset(
            folder(kind),
            shuffle=True,
            seed=3,
            rank=rank,
            world_size=2,
            members=["count"],
            even=None,
            socket=daemon.socket,
        )
        loader = dataset.loader(batch_size=2, num_workers=2, drop_last=False)
        seen += [int(count) for batch in loader for count in batch["count"]]
    assert sorted(-count // 10**12 for count in seen) == list(range(SAMPLES))


@pytest.mark.parametrize("kind", FORMATS)
def test_epoch_resumes_in_its_middle(daemon: Daemon, kind: str) -> None:
    """A second dataset gives from the state on the samples that the first would have given."""

    def make() -> ShardDataset:
        return ShardDataset(
            folder(kind), shuffle=True, seed=5, members=["Name"], socket=daemon.socket
        )

    expected = [sample["Name"] for sample in make()]
    first = make()
    samples = iter(first)
    begun = [next(samples)["Name"] for _ in range(4)]
    second = make()
    second.load_state_dict(first.state_dict())
    assert begun + [sample["Name"] for sample in second] == expected


@one
def test_sets_of_formats_are_mixed_with_tars(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    """A mixture has the samples of both."""
    tars = ShardDataset(write_indexed(tmp_path, [6, 6]), shuffle=True, seed=1, socket=daemon.socket)
    others = ShardDataset(
        folder(kind), shuffle=True, seed=1, members=["count"], socket=daemon.socket
    )
    found = list(Mixture({"tars": tars, "others": others}, weights=[1, 1]))
    assert any("count" in sample for sample in found)
    assert any("count" not in sample for sample in found)


@pytest.fixture
def damaged_set(tmp_path: Path) -> str:
    """Return the url of a set of shards in which the text of sample 1 is no UTF-8."""
    shutil.copytree(DATA / "mds/plain", tmp_path / "damaged")
    shard = tmp_path / "damaged/shard.00000.mds"
    name = "sämple 1".encode()
    shard.write_bytes(shard.read_bytes().replace(name, b"\xff" * len(name)))
    return f"file://{tmp_path}/damaged/"


def test_damaged_value_names_column_and_sample(daemon: Daemon, damaged_set: str) -> None:
    """It is an error of its sample alone."""
    url = f"{damaged_set}shard.00000.mds"
    with pytest.raises(DecodeError, match="the sample '00000001': the column 'Name'"):
        list(ShardReader(url, socket=daemon.socket))

    reader = ShardReader(url, socket=daemon.socket, on_error="ignore")
    assert describe(next(iter(reader))["Name"]) == values("mds")[0]["Name"]


def test_damaged_value_is_named_by_number_and_joined(daemon: Daemon, damaged_set: str) -> None:
    """Joined, by the column's name in the samples, which `decode` takes."""
    damaged = ShardDataset(damaged_set, shuffle=False, socket=daemon.socket)
    with (
        damaged.indexed() as samples,
        pytest.raises(DecodeError, match="the sample '00000001': the column 'Name'"),
    ):
        samples[1]

    whole = ShardDataset(folder("mds"), shuffle=False, socket=daemon.socket)
    with pytest.raises(DecodeError, match=r"the sample '00000001': the column 'copy\.Name'"):
        list(Joined({"": whole, "copy": damaged}))


def test_chunks_without_their_index_name_what_is_missing(daemon: Daemon, tmp_path: Path) -> None:
    """A chunk does not say what is in it."""
    shutil.copy(DATA / "litdata/plain/chunk-0-0.bin", tmp_path)
    with pytest.raises(NotFoundError, match=r"index\.json"):
        list(ShardReader(f"file://{tmp_path}/chunk-0-0.bin", socket=daemon.socket))


def test_index_of_shardcache_counts_shards_of_formats(daemon: Daemon, tmp_path: Path) -> None:
    """`shardcache index` lists them as it does tars, with a table of their samples."""
    out = tmp_path / "index.json"
    cli.shardcache("index", folder("mds"), "-o", str(out), "--samples", socket=daemon.socket)
    rows = json.loads(out.read_text())["shardlist"]
    assert sum(row["nsamples"] for row in rows) == SAMPLES
    with ShardDataset(f"file://{out}", socket=daemon.socket).indexed() as samples:
        assert describe(samples[9]["Name"]) == values("mds")[9]["Name"]


@pytest.mark.slow
@one
def test_three_jobs_fetch_each_byte_once(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """Each shard comes once for the node; the index.json is read as well."""
    plain = DATA / kind / "plain"
    sizes = {path.name: path.stat().st_size for path in plain.iterdir()}
    index_bytes = sizes.pop("index.json")
    with Daemon(tmp_path_factory.mktemp("d")) as own:
        for _ in range(3):
            assert sum(1 for _ in ShardReader(folder(kind), socket=own.socket)) == SAMPLES
        fetched_bytes = own.status()["counters"]["origin_bytes"]
    assert sum(sizes.values()) <= fetched_bytes <= sum(sizes.values()) + 2 * index_bytes
