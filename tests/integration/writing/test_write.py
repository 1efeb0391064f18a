"""`shardcache write` to a folder: formats, tables, resuming, refusals, memory."""

import bz2
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardcache.cli.common import FAILED, USAGE
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.tables import key_of
from shardcache.store.codecs import zstd
from shardcache_client.dataset import ShardDataset
from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import rows, samples, shards, table_rows

CODECS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
}
# One process, for each costs half a second of a core; the tests that are about several say how
# many.
ALONE = ("--workers", "1")
SIZE = ("--shard-size", "20kB", *ALONE)


@pytest.mark.slow
def test_printed_line_reads_the_shards(photos: Path, tmp_path: Path) -> None:
    """The members that were made, and a line of Python that decodes those that all samples have."""
    (photos / "cat" / "000.txt").unlink()
    out = shardcache("write", *ALONE, photos, tmp_path / "out", "--classes").out
    assert "members: cls, jpg, txt (in 39)\n" in out
    assert out.endswith("decode={'cls': 'int', 'jpg': 'rgb8'})\n")
    line = out.partition("read it with: ")[2]
    with Daemon(tmp_path) as daemon, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCACHE_SOCKET", str(daemon.socket))
        dataset = eval(line, {"ShardDataset": ShardDataset})
        assert len(dataset.select(lambda entry: "txt" not in entry.sizes)) == 1


def test_a_folder_becomes_samples_by_key(photos: Path, tmp_path: Path) -> None:
    """Files that differ in their extension are one sample; sizes keep to the limit."""
    ran = shardcache("write", photos, tmp_path / "out", *SIZE, "--classes", "--json")
    assert ran.code == 0, ran.err
    found = samples(tmp_path / "out")
    expected = {
        str(path.relative_to(photos).with_suffix("")): {
            "jpg": path.read_bytes(),
            "txt": path.with_suffix(".txt").read_bytes(),
            "cls": b"1" if path.parent.name == "dog" else b"0",
        }
        for path in sorted(photos.glob("*/*.jpg"))
    }
    assert list(found.items()) == list(expected.items())
    files = shards(tmp_path / "out")
    assert list(files) == [f"shard-{number:06d}.tar" for number in range(len(files))]
    assert len(files) > 3
    assert max(map(len, files.values())) <= 20_000
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]
    listed = table_rows(tmp_path / "out" / "index.samples")
    assert [key for row in listed for key in row["keys"]] == list(expected)
    assert ran.json == {
        "index": f"{tmp_path}/out/index.json",
        "shards": len(files),
        "written": len(files),
        "kept": 0,
        "samples": 40,
        "members": {"cls": 40, "jpg": 40, "txt": 40},
        "bytes": sum(map(len, files.values())),
        "skipped_files": 1,
    }


@pytest.mark.parametrize("name", ["photos/cat/000.png", "lines.jsonl"])
def test_pipes_are_no_input(photos: Path, tmp_path: Path, name: str) -> None:
    """Nothing waits for a program that might write to one."""
    os.mkfifo(tmp_path / name)
    source = photos if name.startswith("photos") else tmp_path / name
    refused = shardcache("write", *ALONE, source, tmp_path / "out")
    assert refused.code == FAILED
    assert "not a regular file" in refused.err
    assert f"Where: {tmp_path / name}\n" in refused.err


@pytest.mark.slow
def test_a_class_may_have_a_name_of_any_bytes(photos: Path, tmp_path: Path) -> None:
    """The list of classes is JSON nevertheless, in which Python finds the same name."""
    folder = photos / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / "1.jpg").touch()
    shardcache("write", *ALONE, photos, tmp_path / "out", "--classes")
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == [
        "cat",
        "dog",
        folder.name,
    ]


def test_only_folders_with_samples_are_classes(photos: Path, tmp_path: Path) -> None:
    """Folders that hold no sample get no number, which would shift all labels."""
    for name in (
        "__MACOSX/cat/._000.jpg",
        "__MACOSX/copy.jpg",
        "cat/._000.jpg",
        "cow/empty/.hidden",
        "deer/README",
    ):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_text("no sample")
    ran = shardcache("write", *ALONE, photos, tmp_path / "out", "--classes", "--json")
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["cat", "dog"]
    found = samples(tmp_path / "out")
    assert {key.partition("/")[0] for key in found} == {"cat", "dog"}
    assert found["dog/001"]["cls"] == b"1"


def make_files(folder: Path, *names: str) -> Path:
    """Write files that hold their own names, and return the folder."""
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("22.05.png", "22.06.png"),
        ("img.1.png", "img.2.png", "img.3.png"),
        ("img.png", "img.1.png"),
        ("at 10.15.22.png", "at 10.15.23.jpg"),
        ("7.left.png", "7.1.png"),
    ],
)
def test_numbered_files_are_not_merged(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The error names two of them and both remedies; the last dot makes each a sample."""
    folder = make_files(tmp_path / "in", *names)
    refused = shardcache("write", *ALONE, folder, tmp_path / "out")
    assert refused.code == USAGE
    assert "would become one sample" in refused.err
    assert "--key-at last-dot" in refused.err
    assert "--key-at first-dot" in refused.err
    assert not (tmp_path / "out" / "index.json").exists()
    ran = shardcache("write", *ALONE, folder, tmp_path / "last", "--key-at", "last-dot")
    assert ran.code == 0, ran.err
    parts = [name.rpartition(".") for name in names]
    assert samples(tmp_path / "last") == {
        stem.replace(".", "_"): {extension: f"{stem}.{extension}".encode()}
        for stem, _, extension in parts
    }
    ran = shardcache("write", *ALONE, folder, tmp_path / "first", "--key-at", "first-dot")
    assert ran.code == 0, ran.err
    assert len(samples(tmp_path / "first")) == 1


@pytest.mark.slow
def test_words_after_the_first_dot_name_members(tmp_path: Path) -> None:
    """Numbers that all files of a sample share also name members, and none are merged."""
    folder = make_files(
        tmp_path / "in",
        "6.left.png",
        "6.right.png",
        "7.left.png",
        "7.right.png",
        "7.json",
        "8.05.png",
        "8.05.txt",
        "9.0.jpg",
        "9.json",
    )
    ran = shardcache("write", *ALONE, folder, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert {key: set(members) for key, members in samples(tmp_path / "out").items()} == {
        "6": {"left.png", "right.png"},
        "7": {"left.png", "right.png", "json"},
        "8": {"05.png", "05.txt"},
        "9": {"0.jpg", "json"},
    }


def test_keys_that_underscores_make_equal_are_refused(tmp_path: Path) -> None:
    """Two samples would be one again."""
    folder = make_files(tmp_path / "in", "22.05.png", "22_05.txt")
    ran = shardcache("write", *ALONE, folder, tmp_path / "out", "--key-at", "last-dot")
    assert ran.code == USAGE
    assert "the key '22_05': 22.05, 22_05" in ran.err


def test_missing_destination_is_named(tmp_path: Path) -> None:
    """The only place given is the source, which nobody forgets."""
    ran = shardcache("write", *ALONE, make_files(tmp_path / "in", "1.txt"))
    assert ran.code == USAGE
    assert "Missing argument 'DESTINATION'" in ran.err


@pytest.mark.slow
def test_files_already_written_are_checked_and_reported(photos: Path, tmp_path: Path) -> None:
    """The number of files that are compared at once, and at the end that nothing was written."""
    assert "checking" not in shardcache("write", *ALONE, photos, tmp_path / "out").err
    again = shardcache("write", *ALONE, photos, tmp_path / "out")
    assert again.code == 0
    assert again.err.startswith("checking 81 files")
    assert "nothing to upload" in again.out


def test_shuffling_of_lines_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """The error names the program that shuffles them."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    ran = shardcache("write", *ALONE, tmp_path / "a.jsonl", tmp_path / "out", "--shuffle", "3")
    assert ran.code == USAGE
    assert "shuf lines.jsonl > shuffled.jsonl" in ran.err


@pytest.mark.slow
def test_the_bytes_depend_on_input_and_settings_alone(photos: Path, tmp_path: Path) -> None:
    """Workers, place and time change no byte, and a seed always shuffles in the same way."""
    copy = tmp_path / "elsewhere" / "photos"
    subprocess.run(["cp", "-r", photos, copy.parent.mkdir() or copy], check=True)
    runs = {
        "one": (photos, "--workers", "1"),
        "two": (copy, "--workers", "2"),
        "seed": (photos, "--shuffle", "7", "--workers", "2"),
        "again": (copy, "--shuffle", "7", "--workers", "1"),
    }
    for name, (source, *flags) in runs.items():
        ran = shardcache("write", source, tmp_path / name, *SIZE, *flags)
        assert ran.code == 0, ran.err
    one, two, seed, again = (shards(tmp_path / name) for name in runs)
    assert one == two
    assert seed == again
    assert one != seed
    tables = {name: (tmp_path / name / "index.samples").read_bytes() for name in runs}
    assert tables["one"] == tables["two"] != tables["seed"]
    assert samples(tmp_path / "seed") == samples(tmp_path / "one")


@pytest.mark.slow
def test_lines_become_samples_by_number(tmp_path: Path) -> None:
    """Each line becomes json or one field as txt, counted through all files."""
    lines = [
        json.dumps({"id": number, "text": f"größer {number}"}, ensure_ascii=False)
        for number in range(100)
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(lines[60:]))
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:59]) + "\n  \n" + lines[59] + "\r\n")
    names = (tmp_path / "b.jsonl", tmp_path / "a.jsonl")
    for out, flags in (("whole", ()), ("text", ("--field", "text"))):
        ran = shardcache("write", *names, tmp_path / out, *SIZE, *flags)
        assert ran.code == 0, ran.err
    keys = [f"{number:09d}" for number in range(101) if number != 59]
    assert samples(tmp_path / "whole") == {
        key: {"json": line.encode()} for key, line in zip(keys, lines, strict=True)
    }
    texts = {
        key: {"txt": json.loads(line)["text"].encode()}
        for key, line in zip(keys, lines, strict=True)
    }
    assert samples(tmp_path / "text") == texts


def test_lines_are_packed(tmp_path: Path) -> None:
    """The index counts the lines packed in each member, without blank ones."""
    lines = [json.dumps({"id": number}).encode() for number in range(3_000)]
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join(lines[:1_000]) + b"\n \t\n\n" + b"\r\n".join(lines[1_000:2_000])
    )
    (tmp_path / "b.jsonl").write_bytes(b"\n".join(lines[2_000:]))
    ran = shardcache(
        "write",
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        tmp_path / "out",
        *SIZE,
        "--pack",
        "--json",
    )
    assert ran.code == 0, ran.err
    assert ran.json["samples"] == 3_000
    assert ran.json["shards"] == 11
    found = []
    files = [tmp_path / "out" / row["url"] for row in rows(tmp_path / "out")]
    for path, row in zip(files, rows(tmp_path / "out"), strict=True):
        tables = index_tar(path, str(path))
        tar = path.read_bytes()
        assert len(tables) == row["nsamples"]
        assert len(tar) <= 20_000
        spans = zip(tables.starts, tables.ends, strict=True)
        found += [
            (key_of(tables, sample), tar[start:end]) for sample, (start, end) in enumerate(spans)
        ]
    keys = [f"{number:09d}" for number in range(3_002) if number not in (1_000, 1_001)]
    assert found == list(zip(keys, lines, strict=True))


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--field", "text"), id="field"),
        pytest.param(("--pack", "--shard-size", "4kB"), id="pack"),
    ],
)
@pytest.mark.slow
def test_compressed_lines_give_the_same_shards(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """As their plain text does, by each codec, whatever the worker that reads a stretch of them."""
    pieces = [
        b"".join(b'{"text": "%d"}\n' % number for number in range(first, first + 150))
        for first in range(0, 750, 150)
    ]
    plain = tmp_path / "plain"
    packed = tmp_path / "packed"
    for folder in (plain, packed):
        folder.mkdir()
    for number, (codec, compress) in enumerate(CODECS.items()):
        (plain / f"{number}.jsonl").write_bytes(b"".join(pieces))
        # A file of several members or frames.
        (packed / f"{number}.jsonl{codec}").write_bytes(b"".join(map(compress, pieces)))
        (plain / f"{number}-end.jsonl").write_bytes(b'{"text": "b"}\n' * 30)
        (packed / f"{number}-end.jsonl{codec}").write_bytes(compress(b'{"text": "b"}\n' * 30))
    for name, workers in (("plain", "1"), ("packed", "2")):
        ran = shardcache(
            "write", tmp_path / name, tmp_path / f"{name}-out", *SIZE, "--workers", workers, *flags
        )
        assert ran.code == 0, ran.err
    assert len(shards(tmp_path / "plain-out")) > 2 * len(CODECS)
    assert shards(tmp_path / "packed-out") == shards(tmp_path / "plain-out")


def peak_kib(source: Path, out: Path) -> int:
    """Return the most memory, in KiB, that any process of a run had at once."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = (
        sys.executable,
        "-m",
        "shardcache",
        "write",
        source,
        out,
        "--shard-size",
        "8MB",
        "--workers",
        "1",
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, command)],
        env=clean_environment({}),
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD_S,
    )
    return int(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    """Ten times as many lines take no more memory: 60 MB of them would show."""
    few = tmp_path / "few.jsonl"
    many = tmp_path / "many.jsonl"
    line = json.dumps({"text": "x" * 280}) + "\n"
    few.write_text(line * 20_000)
    many.write_text(line * 200_000)
    small = peak_kib(few, tmp_path / "a")
    large = peak_kib(many, tmp_path / "b")
    assert sum(row["nsamples"] for row in rows(tmp_path / "b")) == 200_000
    assert large < small + 16 * 1024
