"""Datasets whose samples get members from a table's rows, by key, through a real daemon."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from shardcache.errors import (
    ConfigError,
    DecodeError,
    MetadataError,
    MissingMemberError,
    NotFoundError,
    UnmatchedKeyError,
)
from shardcache_client import ignore_and_continue
from shardcache_client.dataset import Joined, Mixture, ShardDataset
from shardcache_client.joining import JoinedReader
from shardcache_client.reader import ShardReader
from shardcache_client.table import Table
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.reading import keys_of, write_index
from support.shards.tables import index_with_table
from support.shards.tars import make_tar, random_samples

COUNTS = (9, 0, 17, 4)
TOTAL = sum(COUNTS)
SHARDS = [
    random_samples(count, {"wav": 40}, first=sum(COUNTS[:number]))
    for number, count in enumerate(COUNTS)
]
KEYS = [str(sample["__key__"]) for sample in chain.from_iterable(SHARDS)]
ROWS = {
    key: {"text": f"said “{key}”", "duration": int(key) / 4, "tags": [key, None]} for key in KEYS
}

Make = Callable[..., Joined]


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the node's tables: one for each test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "tmp" / f"shardcache-tables-{os.geteuid()}"


@pytest.fixture
def audio(tmp_path: Path) -> str:
    """The index file of the shards."""
    for number, samples in enumerate(SHARDS):
        (tmp_path / f"{number}.tar").write_bytes(make_tar(samples))
    return write_index(tmp_path, COUNTS)


@pytest.fixture
def make(daemon: Daemon, audio: str) -> Make:
    """A function that makes the dataset with a table, as each process of a job would."""

    def make_joined(table: Table, own: Mapping[str, Any] | None = None, **options: Any) -> Joined:
        return Joined(
            {"": ShardDataset(audio, socket=daemon.socket, **options), "row": table}, **(own or {})
        )

    return make_joined


def json_lines(rows: Mapping[str, Mapping[str, Any]], key: str = "id") -> bytes:
    """Return rows as JSON lines, the last keys first: the order of a table does not matter."""
    lines = [
        json.dumps({**row, key: name}, ensure_ascii=False) for name, row in reversed(rows.items())
    ]
    return "\n".join(lines).encode()


def manifest(folder: Path, data: bytes = json_lines(ROWS), name: str = "manifest.jsonl") -> str:
    """Write a table's file; return its url."""
    (folder / name).write_bytes(data)
    return f"file://{folder / name}"


def with_rows(rows: Mapping[str, Mapping[str, Any]] = ROWS) -> list[dict[str, Any]]:
    """Return the joined samples without their urls, in order."""
    return [
        {**sample, **{f"row.{name}": value for name, value in rows[str(sample["__key__"])].items()}}
        for sample in chain.from_iterable(SHARDS)
    ]


def content(
    samples: Iterator[dict[str, Any]] | Sequence[dict[str, Any]] | Joined,
) -> list[dict[str, Any]]:
    """Return samples without their urls, by key."""
    plain = [
        {name: value for name, value in sample.items() if name != "__url__"} for sample in samples
    ]
    return sorted(plain, key=lambda sample: str(sample["__key__"]))


@pytest.mark.parametrize(
    "options", first_quick([{}, {"shuffle": True, "shuffle_window": 2, "seed": 3}]), ids=str
)
def test_samples_get_the_columns_of_their_rows(
    make: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Values are as in the file, in several epochs of the first source's order and length."""
    joined = make(Table(manifest(tmp_path), key="id"), **options)
    assert len(joined) == TOTAL
    for _ in range(2):
        assert content(joined) == with_rows()


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_json_lines_may_be_compressed(
    make: Make, tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    """As the name says; lines that are blank, and a byte order that reverses, do not matter."""
    data = compress(json_lines(ROWS).replace(b"\n", b"\n\n") + b"\n")
    found = content(make(Table(manifest(tmp_path, data, f"rows.jsonl{suffix}"), key="id")))
    assert found == with_rows()


def test_json_lines_may_be_compressed_with_zstd(make: Make, tmp_path: Path) -> None:
    """By the package that the daemon has for shards."""
    zstd = pytest.importorskip("backports.zstd")
    url = manifest(tmp_path, zstd.compress(json_lines(ROWS)), "rows.jsonl.zst")
    assert content(make(Table(url, key="id"))) == with_rows()


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_values_of_csv_are_text(make: Make, tmp_path: Path, suffix: str, delimiter: str) -> None:
    """Quoted or not, with line breaks inside; with a byte order mark, as spreadsheets write it."""
    rows = {key: {"text": f'a "{delimiter}"\n{key}', "n": str(int(key))} for key in KEYS}
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(["id", "text", "n"])
    writer.writerows([key, *row.values()] for key, row in rows.items())
    url = manifest(tmp_path, text.getvalue().encode("utf-8-sig"), f"rows{suffix}")
    assert content(make(Table(url, key="id"))) == with_rows(rows)


def test_tables_may_be_parquet(make: Make, tmp_path: Path) -> None:
    """A pattern names several files, of which only the wanted columns have to be valid."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for part, keys in enumerate((KEYS[:7], KEYS[7:])):
        columns = {"id": keys, "jpg": [b"\xff"] * len(keys)}
        columns |= {
            name: [ROWS[key][name] for key in keys] for name in ("text", "duration", "tags")
        }
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{part}.parquet")

    urls = f"file://{tmp_path}/{{0..1}}.parquet"
    assert content(make(Table(urls, key="id", columns=["text", "duration", "tags"]))) == with_rows()
    with pytest.raises(ConfigError, match=r"the column 'jpg' has bytes") as raised:
        make(Table(urls, key="id"))
    assert "columns=[" in str(raised.value)


def test_keys_are_found_by_a_pattern_or_a_function(make: Make, tmp_path: Path) -> None:
    """The pattern makes the sample's key of the row's, the function the row's of the sample's."""
    url = manifest(
        tmp_path,
        json_lines({f"/data/{key}.wav": row for key, row in ROWS.items()}, "audio_filepath"),
    )
    by_pattern = Table(url, key="audio_filepath", pattern=r".*/([^/]+)\.wav")
    assert content(make(by_pattern)) == with_rows()
    by_function = Table(url, key="audio_filepath", key_of=lambda key: f"/data/{key}.wav")
    assert content(make(by_function)) == with_rows()

    with pytest.raises(
        UnmatchedKeyError, match=r"no row has its key; some keys of the table are '/data/"
    ) as raised:
        list(make(Table(url, key="audio_filepath")))
    assert "pattern or key_of" in str(raised.value)
    with pytest.raises(MetadataError, match="does not match the row's 'audio_filepath', '/data/"):
        make(Table(url, key="audio_filepath", pattern="/other/(.*)"))
    with pytest.raises(MetadataError, match="does not match the row's 'audio_filepath', '/data/"):
        make(Table(url, key="audio_filepath", pattern=r"(/other/.*)?.*"))
    with pytest.raises(DecodeError, match=r"key_of\('.*'\) is 7, which is not text"):
        list(make(Table(url, key="audio_filepath", key_of=lambda key: 7)))  # type: ignore[arg-type, return-value]


def test_flags_of_a_pattern_are_part_of_it(make: Make, tmp_path: Path) -> None:
    """Two patterns that differ in their flags alone find other keys, each by a table of its own."""
    url = manifest(tmp_path, json_lines({f"X_{key}": row for key, row in ROWS.items()}))
    pattern = r"(?:x_)?(.*)"
    with pytest.raises(UnmatchedKeyError, match="some keys of the table are 'X_"):
        list(make(Table(url, key="id", pattern=pattern)))
    found = content(make(Table(url, key="id", pattern=re.compile(pattern, re.IGNORECASE))))
    assert found == with_rows()


def test_table_without_rows_says_so(make: Make, tmp_path: Path) -> None:
    """There are no keys to show."""
    with pytest.raises(UnmatchedKeyError, match="it has no rows"):
        list(make(Table(manifest(tmp_path, b"id,text\n", "manifest.csv"), key="id")))


@pytest.mark.parametrize("fault", first_quick(["missing", "doubled"]))
def test_samples_without_one_row_are_as_missing_says(
    make: Make, tmp_path: Path, fault: str
) -> None:
    """It is an error by default, or left out, or a default. Repeated keys have no row."""
    lines = json_lines(
        {key: row for key, row in ROWS.items() if key != KEYS[11] or fault == "doubled"}
    )
    if fault == "doubled":
        lines += b"\n" + json_lines({KEYS[11]: ROWS[KEYS[0]]})
    table = Table(manifest(tmp_path, lines), key="id")

    with pytest.raises(UnmatchedKeyError, match=repr(KEYS[11])):
        list(make(table))
    found = content(make(table, on_error=ignore_and_continue, even=None))
    assert keys_of(found) == KEYS[:11] + KEYS[12:]

    assert keys_of(content(make(table, {"missing": "skip"}, even=None))) == KEYS[:11] + KEYS[12:]
    filled = {"members": ["wav", "row.text"], "missing": {"row.text": "?"}}
    texts = [sample["row.text"] for sample in content(make(table, filled))]
    assert texts == [ROWS[key]["text"] if key != KEYS[11] else "?" for key in KEYS]


def test_members_choose_columns(make: Make, tmp_path: Path) -> None:
    """Rows must have them; of a table of which none is named, nothing is read."""
    rows: dict[str, dict[str, Any]] = {key: {**row} for key, row in ROWS.items()}
    del rows[KEYS[5]]["duration"]
    table = Table(manifest(tmp_path, json_lines(rows)), key="id")

    assert set(content(make(table, {"members": ["wav", "row.text"]}))[0]) == {
        "__key__",
        "wav",
        "row.text",
    }
    with pytest.raises(MissingMemberError, match=r"row\.duration"):
        list(make(table, {"members": ["wav", "row.duration"]}))
    skipping = {"members": ["wav", "row.duration"], "missing": "skip"}
    assert keys_of(content(make(table, skipping, even=None))) == KEYS[:5] + KEYS[6:]
    nowhere = Table(f"file://{tmp_path}/nowhere.jsonl", key="id")
    assert keys_of(content(make(nowhere, {"members": ["wav"]}))) == KEYS


def test_functions_get_samples_with_their_rows(make: Make, tmp_path: Path) -> None:
    """Those of decode, map and filter."""
    table = Table(manifest(tmp_path), key="id", columns=["duration"])
    decoded = make(table, {"decode": lambda sample: (sample["__key__"], sample["row.duration"])})
    assert sorted(decoded) == [(key, ROWS[key]["duration"]) for key in KEYS]
    long = make(table, {"decode": {"wav": len}}).filter(lambda sample: sample["row.duration"] >= 4)
    assert {sample["wav"] for sample in long} == {40}
    assert keys_of(content(list(long))) == [key for key in KEYS if ROWS[key]["duration"] >= 4]


@pytest.mark.slow
def test_rows_choose_samples(daemon: Daemon, audio: str, tmp_path: Path) -> None:
    """select() sees them beside the sizes, before any sample is read."""
    index_with_table(daemon, tmp_path)
    joined = Joined(
        {"": ShardDataset(audio, socket=daemon.socket), "row": Table(manifest(tmp_path), key="id")}
    )
    short = joined.select(
        lambda entry: entry.rows["row"]["duration"] < 3 and entry.sizes["wav"] == 40
    )
    assert len(short) == 12
    assert keys_of(content(short)) == KEYS[:12]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        pytest.param({"num_workers": 2, "workers": "threads"}, marks=pytest.mark.slow),
        pytest.param(
            {"num_workers": 2, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_loader_resumes_with_other_values(
    make: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    """A state stays valid when the table's values change, as keys and order have not."""
    shuffle = {"shuffle": True, "shuffle_window": 2, "batch_size": 4}
    loader = make(Table(manifest(tmp_path), key="id"), **shuffle).loader(collate_fn=list, **options)
    first = list(islice(loader, 3))
    state = json.loads(json.dumps(loader.state_dict()))

    changed = {key: {**row, "text": row["text"].upper()} for key, row in ROWS.items()}
    url = manifest(tmp_path, json_lines(changed), "second.jsonl")
    resumed = make(Table(url, key="id"), **shuffle).loader(collate_fn=list, **options)
    resumed.load_state_dict(state)
    rest = list(chain.from_iterable(resumed))
    assert sorted(keys_of(chain.from_iterable(first)) + keys_of(rest)) == KEYS
    assert {sample["__key__"]: sample["row.text"] for sample in rest} == {
        key: changed[key]["text"] for key in keys_of(rest)
    }


@pytest.mark.slow
def test_workers_of_a_plain_loader_have_the_table(make: Make, tmp_path: Path) -> None:
    """Without reading it again; and the dataset can be pickled."""
    joined = pickle.loads(pickle.dumps(make(Table(manifest(tmp_path), key="id"), batch_size=4)))
    loader = DataLoader(joined, batch_size=4, num_workers=2, collate_fn=list)
    assert content(list(chain.from_iterable(loader))) == with_rows()


@pytest.mark.slow
def test_a_table_is_made_once_for_a_version(audio: str, tmp_path: Path, tables: Path) -> None:
    """Later datasets map the same file, unless the table, its key or columns change."""
    url = manifest(tmp_path)
    with Daemon(tmp_path, "--listing-ttl-s", "0") as daemon:

        def joined(**options: Any) -> Joined:
            return Joined(
                {
                    "": ShardDataset(audio, socket=daemon.socket),
                    "row": Table(url, key="id", **options),
                }
            )

        joined()
        (made,) = tables.glob("*.rows")
        inode = made.stat().st_ino
        assert content(joined()) == with_rows()
        assert [path.stat().st_ino for path in tables.glob("*.rows")] == [inode]

        joined(columns=["text"])
        assert len([*tables.glob("*.rows")]) == 2
        changed = {key: {**row, "text": "now"} for key, row in ROWS.items()}
        manifest(tmp_path, json_lines(changed))
        assert content(joined()) == with_rows(changed)
        assert len([*tables.glob("*.rows")]) == 3


@pytest.mark.parametrize("kept_bytes", first_quick([0, 20, 1_000]))
def test_a_table_that_was_cut_is_made_again(
    make: Make, tmp_path: Path, tables: Path, kept_bytes: int
) -> None:
    """A file has its name but not all of its bytes if the node lost power while it was written."""
    table = Table(manifest(tmp_path), key="id")
    assert content(make(table)) == with_rows()
    (made,) = tables.glob("*.rows")
    os.truncate(made, kept_bytes)
    assert content(make(table)) == with_rows()


def test_tables_that_nobody_opens_are_removed(make: Make, tmp_path: Path, tables: Path) -> None:
    """After a week, when another one is made."""
    make(Table(manifest(tmp_path), key="id"))
    (old,) = tables.glob("*.rows")
    os.utime(old, (0, 0))
    make(Table(manifest(tmp_path), key="id", columns=["text"]))
    assert not old.exists()


def test_a_folder_of_others_is_refused(make: Make, tmp_path: Path, tables: Path) -> None:
    """Whoever may write there could have put other rows into it."""
    tables.mkdir(mode=0o777)
    tables.chmod(0o777)
    with pytest.raises(Exception, match="other users can write to") as raised:
        make(Table(manifest(tmp_path), key="id"))
    assert "chmod 700" in str(raised.value)


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (b'{"id": 1}\n{"id"', "rows.jsonl", "line 2 is not JSON"),
        (b"[1]\n", "rows.jsonl", r"line 1 is not a JSON object: \[1\]"),
        (b'{"key": 1}\n', "rows.jsonl", "a row of the table has no 'id'; it has 'key'"),
        (b"id,text\n1\n", "rows.csv", "line 2 has another number of fields"),
        (gzip.compress(b'{"id": 1}\n')[:-4], "rows.jsonl.gz", "cannot be read to its end"),
    ],
    ids=["json", "list", "key", "csv", "gzip"],
)
def test_damaged_tables_are_errors(
    make: Make, tmp_path: Path, data: bytes, name: str, message: str
) -> None:
    """With the place in the file; nothing is left behind that would be taken for a table."""
    for _ in range(2):
        with pytest.raises(MetadataError, match=message):
            make(Table(manifest(tmp_path, data, name), key="id"))


def test_arguments_that_do_not_fit_are_errors(make: Make, tmp_path: Path, daemon: Daemon) -> None:
    """Each says what to write instead."""
    url = manifest(tmp_path)
    table = Table(url, key="id")
    with pytest.raises(ConfigError, match="the first source, is a Table"):
        Joined({"": table})
    with pytest.raises(ConfigError, match=r"decode names 'row\.text', a column of a table"):
        make(table, {"decode": {"row.text": str.upper}})
    with pytest.raises(ConfigError, match="names only columns of tables"):
        make(table, {"members": ["row.text"]})
    for options in ({}, {"members": ["wav", "row.title"]}):
        with pytest.raises(
            ConfigError, match=r"missing has a value for 'row\.text', which members does not name"
        ):
            make(table, {**options, "missing": {"row.text": ""}})
    for alternatives in ("row.text;row.title", "wav;row.text"):
        with pytest.raises(ConfigError, match=f"names '{alternatives}', but a table's columns"):
            make(table, {"members": [alternatives]})
    with pytest.raises(ConfigError, match="has no group"):
        Table(url, key="id", pattern=r".*\.wav")
    with pytest.raises(ConfigError, match="is not a regular expression"):
        Table(url, key="id", pattern="(")
    with pytest.raises(ConfigError, match=r"a table of this kind cannot be read"):
        make(Table(manifest(tmp_path, b"", "rows.xlsx"), key="id"))
    with pytest.raises(NotFoundError, match=re.escape("nowhere.jsonl")):
        make(Table(f"file://{tmp_path}/nowhere.jsonl", key="id"))


@pytest.mark.slow
def test_tables_join_mixtures_and_readers_without_torch(
    daemon: Daemon, audio: str, tmp_path: Path
) -> None:
    """As other sources do."""
    url = manifest(tmp_path)
    reader = JoinedReader(
        {"": ShardReader(audio, socket=daemon.socket), "row": Table(url, key="id")}
    )
    assert content(list(reader)) == with_rows()

    joined = Joined({"": ShardDataset(audio, socket=daemon.socket), "row": Table(url, key="id")})
    plain = ShardDataset(audio, socket=daemon.socket)
    mixed = list(
        islice(
            Mixture({"with": joined, "without": plain}, weights={"with": 1, "without": 1}), TOTAL
        )
    )
    assert {name for sample in mixed if sample["__source__"] == "with" for name in sample} >= {
        "row.text"
    }
    assert not any("row.text" in sample for sample in mixed if sample["__source__"] == "without")
