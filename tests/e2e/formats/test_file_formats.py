"""Zips, JSON Lines, TFRecord, ArrayRecord and parquet files: samples as from tars."""

import gzip
import io
import json
import lzma
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shardcache.errors import CorruptShardError, SampleError, UnsupportedShardError
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.files.paths import open_cached
from shardcache_client.handlers import ignore_and_continue
from support import TESTS
from support.programs.daemon import Daemon
from support.shards.file_formats import (
    EXPECTED,
    FORMATS,
    SAMPLES,
    SHARDS,
    Row,
    plain,
    rows_of_shard,
    tf_records,
    zipped,
)
from support.shards.reading import keys_of, write_index
from support.shards.tars import make_tar
from support.shards.tf_records import example, framed

DATA = TESTS / "data" / "formats"

SPELLINGS = {"b.ndjson", "d.jsonl.zst", "b.tfrecords", "c.tfrecord.gz"}
"""Names of formats that others have under another name: those are tested each time."""


KINDS = {"deflated.ZIP", "a.jsonl", "a.parquet"}
"""Names of one format of each kind: members, lines and columns."""


def _param(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] if name in SPELLINGS else [])


def _param_of_kind(name: str) -> Any:
    return pytest.param(name, marks=[] if name in KINDS else [pytest.mark.slow])


def _folder(folder: Path, name: str) -> Path:
    """Return a folder of three files of a format."""
    place = folder / name
    return place if place.exists() else write(place, name, range(SHARDS))


@pytest.fixture(scope="module", params=map(_param, FORMATS))
def files(folder: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of three files of a format, for each format."""
    return _folder(folder, request.param)


@pytest.fixture(scope="module", params=map(_param_of_kind, FORMATS))
def files_of_a_kind(folder: Path, request: pytest.FixtureRequest) -> Path:
    """The same for one quick format of each kind, for tests of what comes after the format."""
    return _folder(folder, request.param)


def write(place: Path, name: str, shards: Iterable[int]) -> Path:
    """Write files of a format into a new folder; return it."""
    place.mkdir()
    for shard in shards:
        (place / f"{shard}-{name}").write_bytes(FORMATS[name](rows_of_shard(shard)))
    return place


def test_samples_are_those_that_were_written(files: Path, daemon: Daemon) -> None:
    """In the order of the files of a folder."""
    assert [plain(sample) for sample in ShardDataset(f"{files}/", socket=daemon.socket)] == EXPECTED


@pytest.mark.slow
def test_ranks_and_workers_get_each_sample_once(files_of_a_kind: Path, daemon: Daemon) -> None:
    """Shuffled, two ranks with two workers each."""
    index = write_index(files_of_a_kind, [SAMPLES] * SHARDS, f"{{}}-{files_of_a_kind.name}")
    found: list[Row] = []
    for rank in range(2):
        ds = ShardDataset(index, socket=daemon.socket, shuffle=True, rank=rank, world_size=2)
        for batch in ds.loader(batch_size=5, num_workers=2, collate_fn=list):
            found += [plain(sample) for sample in batch]
    assert sorted(found, key=lambda row: row["__key__"]) == EXPECTED


@pytest.mark.slow
def test_epoch_resumes_after_any_batch(files_of_a_kind: Path, daemon: Daemon) -> None:
    """The state of a loader continues with the very next batch."""
    index = write_index(files_of_a_kind, [SAMPLES] * SHARDS, f"{{}}-{files_of_a_kind.name}")

    def loader() -> Any:
        return ShardDataset(index, socket=daemon.socket, shuffle=True, seed=3).loader(
            batch_size=4, collate_fn=list
        )

    whole = [keys_of(batch) for batch in loader()]
    stopped = loader()
    first = [keys_of(batch) for batch in islice(stopped, 2)]
    state = json.loads(json.dumps(stopped.state_dict()))
    fresh = loader()
    fresh.load_state_dict(state)
    assert first + [keys_of(batch) for batch in fresh] == whole


def test_only_chosen_columns_are_read(files: Path, daemon: Daemon) -> None:
    """By `members`, as from tars."""
    ds = ShardDataset(f"{files}/", socket=daemon.socket, members=["label"])
    samples = list(ds)
    assert {tuple(sample) for sample in samples} == {("__key__", "__url__", "label")}
    assert [int(sample["label"]) for sample in samples] == list(range(SHARDS * SAMPLES))


@pytest.fixture(scope="module")
def tars(folder: Path) -> Path:
    """A folder of one tar, with the keys of the first file of each format, in another order."""
    place = folder / "tars"
    place.mkdir()
    rows = reversed(rows_of_shard(0))
    tar = make_tar([{"__key__": row["__key__"], "cls": str(row["label"]).encode()} for row in rows])
    (place / "0.tar").write_bytes(tar)
    return place


@pytest.mark.parametrize("name", ["stored.zip", "a.jsonl", "c.tfrecord.gz", "a.parquet"])
def test_files_and_tars_are_mixed_and_joined(
    folder: Path, tars: Path, daemon: Daemon, name: str
) -> None:
    """Keys of both are compared, and none of the code that does so knows a format."""
    place = write(folder / f"one {name}", name, [0])

    url = write_index(place, [SAMPLES], f"{{}}-{name}")
    of_tars = write_index(tars, [SAMPLES])

    def sources() -> list[ShardDataset]:
        return [ShardDataset(each, socket=daemon.socket) for each in (url, of_tars)]

    mixed = list(Mixture(sources()))
    assert sum("cls" in sample for sample in mixed) == SAMPLES
    assert sum("text" in sample for sample in mixed) == SAMPLES
    joined = list(Joined(dict(zip(("", "tar"), sources(), strict=True))))
    assert [int(sample["label"]) for sample in joined] == [
        int(sample["tar.cls"]) for sample in joined
    ]


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def typed_file(name: str, columns: Row) -> bytes:
    """Return a file of a format with one sample."""
    if name.endswith(".jsonl"):
        return json.dumps(columns).encode() + b"\n"
    if name.endswith(".parquet"):
        data = io.BytesIO()
        pq.write_table(pa.Table.from_pylist([columns]), data)
        return data.getvalue()
    kinds = {bytes: "bytes_list", int: "int64_list", float: "float_list"}
    features = {}
    for column, value in columns.items():
        items = value if isinstance(value, list) else [value]
        features[column] = (kinds[type(items[0])], items)
    # In the second Example, each column has two items, so that none is stored as plain bytes.
    return framed(
        example(features),
        example({name: (kind, items * 2) for name, (kind, items) in features.items()}),
    )


NUMBERS: Row = {"cls": 5, "cls2": 1.5, "id": -7, "index": [1, 2], "inx": 0}
OTHERS: Row = {"json": "[1]", "txt": "5", "jpg": "no file", "mp": {"a": [1]}}
FILES: Row = {"left.cls": b"5", "jsn": b"[1]", "png": png(NOISE)}


@pytest.mark.parametrize("zero_copy", [False, True])
@pytest.mark.parametrize(
    ("name", "values", "files"),
    [
        ("a.parquet", NUMBERS | OTHERS, FILES),
        ("a.jsonl", NUMBERS | OTHERS, {}),
        ("a.tfrecord", NUMBERS, FILES),
    ],
)
def test_decoders_by_extension_get_bytes_alone(
    tmp_path: Path, daemon: Daemon, name: str, values: Row, files: Row, zero_copy: bool
) -> None:
    """Numbers, texts and lists are values already, whatever the name of their column."""
    (tmp_path / name).write_bytes(typed_file(name, values | files))
    dataset = ShardDataset(
        f"file://{tmp_path / name}", socket=daemon.socket, decode="rgb8", zero_copy=zero_copy
    )
    first = next(iter(dataset))
    decoded = {"left.cls": 5, "jsn": [1], "png": NOISE} if files else {}
    np.testing.assert_equal(
        first, {"__key__": "000000000", "__url__": first["__url__"], **values, **decoded}
    )


def test_files_numbered_behind_their_suffix_are_read(folder: Path, daemon: Daemon) -> None:
    """TensorFlow Datasets names all of its files so; those of another format are no shards."""
    place = folder / "numbered"
    place.mkdir()
    for shard in range(SHARDS):
        path = place / f"set-train.tfrecord-{shard:05d}-of-{SHARDS:05d}"
        path.write_bytes(tf_records(rows_of_shard(shard)))
    (place / "notes.txt-00000-of-00001").write_text("no shard")
    assert [plain(sample) for sample in ShardDataset(f"{place}/", socket=daemon.socket)] == EXPECTED


def test_bad_line_is_the_error_of_its_sample(folder: Path, daemon: Daemon) -> None:
    """By default it is raised; a handler skips the sample, and the others are read."""
    place = folder / "bad lines"
    place.mkdir()
    (place / "0.jsonl").write_bytes(b'{"a": 1}\nno JSON\n{"a": 3}\n')
    with pytest.raises(SampleError, match="'000000001' is not a JSON object"):
        list(ShardDataset(f"{place}/", socket=daemon.socket))
    ds = ShardDataset(f"{place}/", socket=daemon.socket, on_error=ignore_and_continue, even=None)
    assert [sample["a"] for sample in ds] == [1, 3]


@pytest.mark.parametrize("name", ["0.jsonl", "0.jsonl.gz", "0.tfrecord"])
def test_file_without_bytes_has_no_samples(folder: Path, daemon: Daemon, name: str) -> None:
    """Programs that find nothing to write leave such files."""
    place = folder / f"empty {name}"
    place.mkdir()
    (place / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    assert list(ShardDataset(f"{place}/", socket=daemon.socket)) == []


def test_array_record_is_read(folder: Path, daemon: Daemon) -> None:
    """A file that Google's library has written, with the features of its Examples."""
    place = folder / "array records"
    place.mkdir()
    (place / "0.array_record").write_bytes(
        lzma.decompress((DATA / "groups.array_record.xz").read_bytes())
    )
    samples = list(ShardDataset(f"{place}/", socket=daemon.socket))
    assert [sample["label"] for sample in samples] == list(range(-3, 9))
    assert all(isinstance(sample["tokens"], np.ndarray) for sample in samples)


@pytest.mark.parametrize("name", ["deflated.ZIP", "a.parquet", "a.jsonl"])
def test_file_of_an_object_has_its_own_bytes(folder: Path, daemon: Daemon, name: str) -> None:
    """Samples are read from another file than that of a program that wants a zip, or a table."""
    place = write(folder / f"file {name}", name, [0])
    path = place / f"0-{name}"
    assert len(list(ShardDataset(f"{place}/", socket=daemon.socket))) == SAMPLES
    with open_cached(str(path), socket=daemon.socket) as file:
        assert file.read() == path.read_bytes()


def test_encrypted_zip_is_an_error_that_says_so(folder: Path, daemon: Daemon) -> None:
    """The member is named, and what to do."""
    place = folder / "encrypted"
    place.mkdir()
    data = bytearray(zipped(rows_of_shard(0)))
    data[data.index(b"PK\1\2") + 8] |= 1
    (place / "0.zip").write_bytes(data)
    with pytest.raises(UnsupportedShardError, match=r"'n000\.image' of the zip is encrypted"):
        list(ShardDataset(f"{place}/", socket=daemon.socket))


@pytest.mark.slow
def test_damaged_parquet_file_is_an_error(folder: Path, daemon: Daemon) -> None:
    """With pyarrow's words, and the daemon goes on."""
    place = folder / "damaged"
    place.mkdir()
    (place / "0.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(CorruptShardError, match="the parquet file cannot be read"):
        list(ShardDataset(f"{place}/", socket=daemon.socket))
    assert daemon.request("GET", "/v1/status")
