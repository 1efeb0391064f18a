"""Written samples: names, content, headers, cuts, shard names, journal, inputs, rows."""

import bz2
import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError, InputError, SampleError
from shardcache.shared.tarindex.members import parse_header
from shardcache.store.codecs import zstd
from shardcache.writing.inputs import WriteOptions, open_source, recognize
from shardcache.writing.journal import Journal, ShardRecord, resume
from shardcache.writing.member_columns import columns_of, samples_of_rows
from shardcache.writing.sample_tar import END, Sample, header, sample_of
from shardcache.writing.shard_cuts import Cut, ShardNames, cut

URL = "s3://bucket/train/"
CODECS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
}


def packed(*samples: Sample) -> bytes:
    return b"".join(piece for sample in samples for piece in sample.tar()) + END


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300),
    st.integers(0, 2**34),
)
def test_headers_are_those_of_tarfile(name: str, size_bytes: int) -> None:
    """Any name and size gives byte for byte the standard library's header."""
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    assert header(name.encode(), size_bytes) == info.tobuf(
        tarfile.GNU_FORMAT, "utf-8", "surrogateescape"
    )
    if len(name.encode()) <= 100:
        parse_header(header(name.encode(), size_bytes))


@given(
    st.lists(
        st.tuples(st.text("abcö", min_size=1, max_size=90), st.binary(max_size=2000)), max_size=5
    )
)
def test_tars_are_read_by_tarfile_and_have_the_size_foretold(
    members: list[tuple[str, bytes]],
) -> None:
    """tarfile finds names and contents; the size that shards are cut by is exact."""
    samples = [
        Sample(f"{number}-{key}", (("bin", data),)) for number, (key, data) in enumerate(members)
    ]
    data = packed(*samples)
    assert len(data) == sum(sample.size_bytes for sample in samples) + len(END)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
    assert found == [(f"{sample.key}.bin", sample.members[0][1]) for sample in samples]


@pytest.mark.parametrize(
    ("extension", "value", "content"),
    [
        ("jpg", b"\xff\xd8", b"\xff\xd8"),
        ("bin", bytearray(b"ab"), b"ab"),
        ("txt", "größer", "größer".encode()),
        ("cls", 7, b"7"),
        ("label.cls", numpy.int64(7), b"7"),
        ("json", {"a": [1, "ö"]}, '{"a":[1,"ö"]}'.encode()),
        ("json", "a", b'"a"'),
    ],
)
def test_values_are_encoded_by_their_extension(extension: str, value: Any, content: bytes) -> None:
    """As webdataset's writers encode them."""
    assert sample_of({"__key__": "1", extension: value}).members == ((extension, content),)


def test_arrays_are_encoded_as_npy() -> None:
    """NumPy reads them back."""
    array = numpy.arange(6).reshape(2, 3)
    ((_, data),) = sample_of({"__key__": "1", "npy": array, "__url__": "left out"}).members
    assert (numpy.load(io.BytesIO(data)) == array).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"jpg": b""},
        {"__key__": 7, "jpg": b""},
        {"__key__": "1"},
        {"__key__": "v1.5", "jpg": b""},
        {"__key__": "", "jpg": b""},
        {"__key__": "__meta__", "jpg": b""},
        {"__key__": "__MACOSX/1", "jpg": b""},
        {"__key__": "folder/", "_1.jpg": b""},
        {"__key__": "folder/", "DS_Store": b""},
        {"__key__": "1", "a/b": b""},
        {"__key__": "1\0 2", "jpg": b""},
        {"__key__": f"{'folder/' * 20}\0 2", "jpg": b""},
        {"__key__": "1", "j\0pg": b""},
        {"__key__": "1", "": b""},
        {"__key__": "1", "jpg": b"", "JPG": b""},
        {"__key__": "1", "jpg": 1.5},
        {"__key__": "1", "cls": 1.5},
        {"__key__": "1", "json": object()},
        {"__key__": "1", "text": 1},
        {"__key__": "1", "npy": object()},
        {"__key__": "1\ud83d", "jpg": b""},
        {"__key__": "1", "txt": "\udcff"},
        {"__key__": "1", "json": ["\udcff"]},
    ],
)
def test_samples_that_readers_would_not_find_are_refused(fields: dict[str, Any]) -> None:
    """A dotted key, a nameless or repeated member, and an unencodable value are refused."""
    with pytest.raises(SampleError):
        sample_of(fields)


@given(st.lists(st.integers(0, 60), max_size=60))
def test_cuts_are_whole_and_as_full_as_may_be(sizes: list[int]) -> None:
    """Every sample comes once in order, and no shard over the limit has two samples."""
    most = 50 + len(END)
    cuts = list(cut(((size, place) for place, size in enumerate(sizes)), most))
    places = [place for found in cuts for place in range(found.first, found.last + 1)]
    assert places == list(range(len(sizes)))
    for number, found in enumerate(cuts):
        inside = sizes[found.first : found.last + 1]
        assert found == Cut(found.first, found.last, len(inside), sum(inside) + len(END))
        assert found.size_bytes <= most or len(inside) == 1
        assert number + 1 == len(cuts) or found.size_bytes + sizes[found.last + 1] > most


@pytest.mark.parametrize(
    "pattern", ["shard.tar", "%06d", "a/%06d.tar", "%d-%d.tar", "%s.tar", ".%d.tar", "100%-%d.tar"]
)
def test_patterns_for_names_have_one_number(pattern: str) -> None:
    """Any other pattern would give two shards one name, or a name that is none."""
    with pytest.raises(ConfigError):
        ShardNames(pattern)


def test_foreign_shards_are_distinguished_from_own() -> None:
    """By the whole name, digits included."""
    own = ["train-000000.tar", "train-1000000.tar", "index.json", "notes.txt"]
    others = ["train-0001.tar", "val-000000.tar", "train-000001.tar.gz"]
    assert ShardNames("train-%06d.tar").shards_not_matching(own + others) == sorted(others)


def test_a_journal_is_resumed_with_its_own_settings_alone() -> None:
    """Its shards come back; another size, format or half a journal is a named error."""
    journal = Journal(
        {"shard_size_bytes": 10, "input": "jsonl 1f"},
        {"shard-000000.tar": ShardRecord(9, "etag", 3)},
    )
    assert resume(journal.to_json(), journal.settings, URL) == journal
    with pytest.raises(ConfigError, match=r"shard_size_bytes: 10 then, 11 now"):
        resume(journal.to_json(), journal.settings | {"shard_size_bytes": 11}, URL)
    with pytest.raises(ConfigError, match="damaged"):
        resume(journal.to_json()[:-9], journal.settings, URL)
    newer = json.loads(journal.to_json()) | {"format": 2}
    with pytest.raises(ConfigError, match="another release"):
        resume(json.dumps(newer).encode(), journal.settings, URL)


def options(**changes: Any) -> WriteOptions:
    return WriteOptions(shard_size_bytes=20_000, **changes)


LINES = b'{"text": "a"}\n' * 1_234
UNUSABLE: dict[str, tuple[str, bytes, str]] = {
    **{
        f"{codec}, cut short": (f"a.jsonl{codec}", pack(LINES)[:-4], "ends early")
        for codec, pack in CODECS.items()
    },
    **{
        f"{codec} in name alone": (f"a.jsonl{codec}", LINES, "cannot be decompressed")
        for codec in CODECS
    },
    "no JSON": ("a.jsonl", LINES + b"{", "line 1,234, .* it is not JSON"),
    "no such field": ("a.jsonl", LINES + b'{"a": 1}', "line 1,234, .* no field 'text'"),
    "a field of another type": ("a.jsonl", LINES + b'{"text": 1}', "line 1,234, .* not a text"),
    "half a surrogate pair": (
        "a.jsonl",
        LINES + b'{"text": "\\udcff"}',
        "line 1,234, .* half a surrogate pair",
    ),
    "a number for a line": ("a.jsonl", LINES + b"7", "line 1,234, .* no field"),
    "no parquet": ("a.parquet", LINES, "not a readable parquet file"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_input_that_cannot_be_used_is_named(tmp_path: Path, name: str) -> None:
    """The error has file, line and reason."""
    file, data, reason = UNUSABLE[name]
    path = tmp_path / file
    path.write_bytes(data)
    found = recognize(
        [str(path)], options(field=None if path.suffix == ".parquet" else "text"), tmp_path
    )
    with pytest.raises(InputError, match=reason) as caught:
        source = open_source(found.kind, found.arguments)
        positions = [position for _, position in source.sized_positions()]
        list(source.read(positions[0], positions[-1]))
    assert caught.value.url == str(path)


@pytest.mark.parametrize(
    ("names", "changes", "reason"),
    [
        (["none"], {}, "no such file"),
        (["a.json"], {}, "did you mean 'a.jsonl'"),
        (["b.jsonl"], {}, "did you mean 'a.jsonl'"),
        (["photos/*.jpg"], {}, "no file matches"),
        (["photos", "a.jsonl"], {}, "several kinds"),
        (["a.jsonl"], {"shuffle": 1}, "--shuffle does not apply"),
        (["a.jsonl"], {"pack": True, "field": "text"}, "--pack cannot be combined"),
        (["photos"], {"columns": {"a": "b"}}, "--columns does not apply"),
        (["empty"], {}, "no files here"),
        (["loop"], {}, "link to itself"),
    ],
    ids=str,
)
def test_inputs_that_cannot_be_read_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    changes: dict[str, Any],
    reason: str,
) -> None:
    """Missing paths, mixed kinds, foreign options, empty folders and link loops are named."""
    monkeypatch.chdir(tmp_path)
    for folder in ("photos", "empty", "loop", "listing"):
        Path(folder).mkdir()
    Path("photos/1.jpg").touch()
    Path("loop/again").symlink_to(tmp_path / "loop")
    Path("a.jsonl").write_bytes(LINES)
    with pytest.raises((ConfigError, InputError), match=reason):
        recognize(names, options(**changes), Path("listing"))


@pytest.mark.parametrize(
    ("kind", "package", "arguments"),
    [
        ("parquet", "pyarrow", {"files": [], "columns": {}, "seed": None}),
        pytest.param(
            "datasets",
            "datasets",
            {"name": "hf:name", "split": None, "columns": {}, "seed": None},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    kind: str, package: str, arguments: dict[str, Any]
) -> None:
    """The base installation has neither pyarrow nor datasets: the error says what to install."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from shardcache.errors import MissingPackageError\n"
        "from shardcache.writing.inputs import open_source\n"
        f"try: open_source({kind!r}, {arguments!r})\n"
        "except MissingPackageError as exn: print(exn.remedy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"pip install 'shardcache[{kind}]'\n"


def test_a_text_that_is_not_utf_8_is_an_error() -> None:
    """Arrow does not check texts when it reads them."""
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    table = pa.table({"text": text})
    with pytest.raises(InputError, match="not UTF-8"):
        list(samples_of_rows(table, columns_of(table.schema, {}, "a.parquet"), range(1)))
