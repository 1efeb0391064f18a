"""`shardcache write` to a folder: formats, tables, resuming, refusals, memory."""

import bz2
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardcache.cli.common import FAILED, USAGE
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.tables import key_of
from shardcache.store.codecs import zstd
from shardcache_client.dataset import ShardDataset
from support.disks.shim import FOR_EVER, HAS_CC, Action, Op, Shim
from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.processes import running, wait_until_ended
from support.shards.tars import Samples, rows, samples, shards, table_rows

CODECS: Mapping[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
}
# One process, for each costs half a second of a core; the tests that are about several say how
# many.
ALONE = ("--workers", "1")
SIZE = ("--shard-size", "20kB", *ALONE)
needs_cc = pytest.mark.skipif(not HAS_CC, reason="needs a C compiler")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with 40 images and captions in two classes, and what is no sample."""
    folder = tmp_path / "photos"
    rng = random.Random(0)
    for number in range(40):
        place = folder / ("dog" if number % 2 else "cat")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:03d}.jpg").write_bytes(rng.randbytes(2_000))
        (place / f"{number:03d}.txt").write_text(f"photo {number}")
    (folder / "README").write_text("no extension")
    (folder / ".DS_Store").write_text("hidden")
    return folder


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
    """Files that differ in their extension are one sample; sizes keep to the limit, index and table list them."""
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
    """Those that macOS adds, empty ones and those of other files get no number, which would shift all labels."""
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
    """The error names two of them, and both ways on; by the last dot, each is a sample, its key without dots."""
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
    """As do numbers that all files of a sample share: nothing of another sample is merged into it."""
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
    """Not on the number of workers, the place or the time; a seed shuffles, and does so the same way again."""
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
    """Each line unchanged as json, or one of its fields as txt; counted through all files, blank ones included."""
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
    """Many to a member: the index counts them, blank ones left out, whatever ends a line, and through several files."""
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
        (packed / f"{number}.jsonl{codec}").write_bytes(
            b"".join(map(compress, pieces))
        )  # several members or frames
        (plain / f"{number}-end.jsonl").write_bytes(b'{"text": "b"}\n' * 30)
        (packed / f"{number}-end.jsonl{codec}").write_bytes(compress(b'{"text": "b"}\n' * 30))
    for name, workers in (("plain", "1"), ("packed", "2")):
        ran = shardcache(
            "write", tmp_path / name, tmp_path / f"{name}-out", *SIZE, "--workers", workers, *flags
        )
        assert ran.code == 0, ran.err
    assert len(shards(tmp_path / "plain-out")) > 2 * len(CODECS)
    assert shards(tmp_path / "packed-out") == shards(tmp_path / "plain-out")


def recorded(out: Path) -> dict[str, list[int]]:
    """Return the shards in the journal of a run."""
    journal = out / ".shardcache-write.json"
    found: dict[str, list[int]] = (
        json.loads(journal.read_text())["shards"] if journal.exists() else {}
    )
    return found


def start(*args: Path | str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command."""
    command = [sys.executable, "-m", "shardcache", "write", *map(str, args)]
    return subprocess.Popen(
        command, env=clean_environment(env or {}), stderr=subprocess.PIPE, text=True
    )


@contextmanager
def held_back(path: Path) -> Iterator[Mapping[str, str]]:
    """Have an empty file, which is created, opened no sooner than at the end of the block.

    Yield the variables of the command that is to wait.
    """
    path.touch()
    shim = Shim(path.parent.parent.with_suffix(".shim"), root=path.parent)
    shim.arm(Action.HOLD, times=FOR_EVER, ops=(Op.OPEN,), match=path.name)
    try:
        yield shim.env()
    finally:
        shim.release()


@needs_cc
@pytest.mark.slow
def test_frozen_process_ends_the_run_with_its_shard_and_the_remedy(
    photos: Path, tmp_path: Path
) -> None:
    """A process that does not respond is killed, and its shard is named; the same command again writes the rest."""
    out = tmp_path / "out"
    # The process waits for the file, so that it is certainly at work when it is stopped.
    with (
        held_back(photos / "dog" / "zzz.jpg") as env,
        start(photos, out, *SIZE, "--workers", "1", env=env) as run,
    ):
        try:
            eventually(
                lambda: bool(list(out.glob(".shard-*.part")))
            )  # the journal has a draft as well
            (worker,) = running(run.pid, "shardcache.writing.conversion")
            os.kill(worker, signal.SIGSTOP)
            _, err = run.communicate(timeout=GUARD_S)
        finally:
            run.kill()
    wait_until_ended(worker)
    assert run.returncode == 1
    assert "did not respond" in err
    assert "to resume, run the same command again" in err


@needs_cc
@pytest.mark.slow
def test_a_killed_run_is_resumed(photos: Path, tmp_path: Path) -> None:
    """kill -9: its processes end, no half shard lies under its name; the next run keeps what was complete."""
    last = photos / "dog" / "zzz.jpg"
    out = tmp_path / "out"
    last.touch()
    shardcache("write", photos, tmp_path / "fresh", *SIZE)
    fresh = shards(tmp_path / "fresh")
    table = out / "index.samples"
    listed = (tmp_path / "fresh" / "index.samples").read_bytes()
    # Only the last shard's process opens the file.
    with held_back(last) as env, start(photos, out, *SIZE, "--workers", "2", env=env) as run:
        try:
            eventually(
                lambda: (
                    len(recorded(out)) == len(fresh) - 1 and (out / f".{max(fresh)}.part").exists()
                )
            )
            workers = running(run.pid, "shardcache.writing.conversion")
        finally:
            run.send_signal(signal.SIGKILL)
    for pid in workers:
        wait_until_ended(pid)
    assert workers
    assert shards(out) == {name: data for name, data in fresh.items() if name != max(fresh)}
    complete = {path.name: path.stat().st_ino for path in out.glob("*.tar")}
    assert not (out / "index.json").exists()
    resumed = shardcache("write", photos, out, *SIZE, "--workers", "2", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["kept"] == len(complete)
    assert resumed.json["written"] == 1
    assert all((out / name).stat().st_ino == inode for name, inode in complete.items())
    assert shards(out) == fresh
    assert len(samples(out)) == 41
    assert not list(out.glob(".*.part"))
    assert table.read_bytes() == listed
    table.unlink()
    again = shardcache("write", photos, out, *SIZE, "--json")
    assert again.json["kept"] == len(fresh)
    assert again.json["members"] == resumed.json["members"]
    assert table.read_bytes() == listed


@needs_cc
@pytest.mark.slow
def test_input_that_changes_during_the_run_ends_it(photos: Path, tmp_path: Path) -> None:
    """Shards of the old and the new file never lie in one dataset: the error names it, and no index is written."""
    gate = photos / "cat" / "000.png"
    changed = photos / "dog" / "039.jpg"
    with held_back(gate) as env:
        run = start(photos, tmp_path / "out", *SIZE, "--workers", "1", env=env)
        eventually((tmp_path / "out" / ".shard-000000.tar.part").exists)
        changed.write_bytes(bytes(2_000))
    with run:
        _, err = run.communicate()
    assert run.returncode == FAILED
    assert str(changed) in err
    assert "changed while" in err
    assert recorded(tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.slow
def test_other_input_or_settings_never_mix(photos: Path, tmp_path: Path) -> None:
    """A changed file, another size or order: an error that names the change, and nothing is touched."""
    out = tmp_path / "out"
    shardcache("write", photos, out, *SIZE)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    refusals = [
        shardcache("write", photos, out, "--shard-size", "30kB"),
        shardcache("write", photos, out, *SIZE, "--shuffle", "1"),
    ]
    (photos / "cat" / "000.jpg").write_bytes(bytes(2_000))
    refusals.append(shardcache("write", photos, out, *SIZE))
    for ran, named in zip(
        refusals,
        ("shard_size_bytes: 20000 then, 30000 now", "shuffle: null then, 1 now", "input:"),
        strict=True,
    ):
        assert ran.code == USAGE
        assert named in ran.err
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()} == before


@pytest.mark.slow
def test_shards_of_others_are_not_mixed_with(photos: Path, tmp_path: Path) -> None:
    """A destination that holds a shard which this command has not written is refused, before and after its own."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.tar").write_bytes(b"")
    assert "old.tar" in shardcache("write", photos, out, *SIZE).err
    assert [path.name for path in out.iterdir()] == ["old.tar"]
    (out / "old.tar").unlink()
    assert shardcache("write", photos, out, *SIZE).code == 0
    (out / "old.tar").write_bytes(b"")
    assert shardcache("write", photos, out, *SIZE).code == USAGE


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


JPEG = b"\xff\xd8\xff" + bytes(500)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(700)
ROW_SIZE = ("--shard-size", "50kB", "--workers", "1")
ROWS = 90


def row(number: int) -> dict[str, Any]:
    """Return a row of every kind of column."""
    return {
        "image": {"bytes": (PNG if number % 2 else JPEG) + bytes([number]), "path": None},
        "raw": bytes([number]),
        "caption": f"größer {number}" if number % 3 else None,
        "label": number % 7,
        "boxes": [{"x": number, "day": date(2026, 1, 1)}],
        "score": number / 2,
    }


def sample(number: int) -> dict[str, bytes]:
    """Return what such a row becomes."""
    members = {
        "image.png" if number % 2 else "image.jpg": row(number)["image"]["bytes"],
        "raw.bin": bytes([number]),
        "caption.txt": f"größer {number}".encode(),
        "label.cls": str(number % 7).encode(),
        "boxes.json": json.dumps(
            [{"x": number, "day": "2026-01-01"}], separators=(",", ":")
        ).encode(),
        "score.json": str(number / 2).encode(),
    }
    return {name: data for name, data in members.items() if number % 3 or name != "caption.txt"}


EXPECTED: Samples = {f"{number:09d}": sample(number) for number in range(ROWS)}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """Two files of 45 rows in row groups of 10."""
    folder = tmp_path / "parquet"
    folder.mkdir()
    table = pa.Table.from_pylist([row(number) for number in range(ROWS)])
    for part in range(2):
        pq.write_table(
            table.slice(45 * part, 45), folder / f"part-{part}.parquet", row_group_size=10
        )
    return folder


@pytest.mark.slow
def test_columns_are_chosen_and_named(parquet: Path, tmp_path: Path) -> None:
    """`--columns` takes those alone, under the extension given; one that does not exist is refused with the others."""
    ran = shardcache("write", *ALONE, parquet, tmp_path / "out", "--columns", "image=img,label=cls")
    assert ran.code == 0, ran.err
    found = samples(tmp_path / "out")
    assert found["000000011"] == {"img": row(11)["image"]["bytes"], "cls": b"4"}
    refused = shardcache("write", *ALONE, parquet, tmp_path / "other", "--columns", "picture=jpg")
    assert refused.code == USAGE
    assert "'picture'" in refused.err
    assert "caption" in refused.err
    assert (
        shardcache("write", *ALONE, parquet, tmp_path / "other", "--columns", "picture").code
        == USAGE
    )


@pytest.mark.slow
def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Unless they are left out: nothing tells which of them is meant."""
    table = pa.table(
        [pa.array([1]), pa.array(["b"]), pa.array(["c"])], names=["label", "text", "text"]
    )
    file = tmp_path / "twice.parquet"
    pq.write_table(table, file)
    for columns in ((), ("--columns", "text=txt")):
        refused = shardcache("write", *ALONE, file, tmp_path / f"out-{len(columns)}", *columns)
        assert refused.code == USAGE
        assert "two columns have the name 'text'" in refused.err
    assert shardcache("write", *ALONE, file, tmp_path / "out", "--columns", "label=cls").code == 0
    assert samples(tmp_path / "out") == {"000000000": {"cls": b"1"}}


@pytest.mark.slow
def test_rows_are_shuffled_by_a_seed(parquet: Path, tmp_path: Path) -> None:
    """Row groups and the rows in each: another order, the same samples, the same bytes for the same seed."""
    for name, seed, workers in (("a", "7", "1"), ("b", "7", "2"), ("c", "8", "1")):
        assert (
            shardcache(
                "write",
                parquet,
                tmp_path / name,
                *ROW_SIZE,
                "--shuffle",
                seed,
                "--workers",
                workers,
            ).code
            == 0
        )
    a, b, c = (shards(tmp_path / name) for name in "abc")
    assert a == b != c
    found = samples(tmp_path / "a")
    assert found == EXPECTED
    assert list(found) != list(EXPECTED)
    assert [int(key) // 10 for key in found] != sorted(int(key) // 10 for key in found)


def test_a_saved_dataset_becomes_samples(tmp_path: Path) -> None:
    """Features as columns of parquet; of several splits, one is to be chosen; files that it refers to are read."""
    datasets = pytest.importorskip("datasets", reason="needs pip install 'shardcache[datasets]'")
    (tmp_path / "file.png").write_bytes(PNG)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    images = [{"bytes": JPEG, "path": None}, {"bytes": None, "path": str(tmp_path / "file.png")}]
    test = datasets.Dataset.from_dict({"image": images * 5, "label": [0, 1] * 5}, features=features)
    train = test.select(range(4))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "saved")
    refused = shardcache("write", *ALONE, tmp_path / "saved", tmp_path / "out")
    assert refused.code == USAGE
    assert "--split: train, test" in refused.err
    command = (
        "write",
        tmp_path / "saved",
        tmp_path / "out",
        "--split",
        "test",
        "--shard-size",
        "8kB",
        "--json",
    )
    ran = shardcache(*command)
    assert ran.code == 0, ran.err
    pair = [{"image.jpg": JPEG, "label.cls": b"0"}, {"image.png": PNG, "label.cls": b"1"}]
    assert samples(tmp_path / "out") == {f"{number:09d}": pair[number % 2] for number in range(10)}
    assert shardcache(*command).json["written"] == 0
    assert (
        shardcache(
            "write", *ALONE, tmp_path / "saved" / "train", tmp_path / "whole", "--shuffle", "1"
        ).code
        == 0
    )
    assert len(samples(tmp_path / "whole")) == 4
    wrong = shardcache(
        "write", *ALONE, tmp_path / "saved" / "train", tmp_path / "wrong", "--split", "test"
    )
    assert wrong.code == USAGE
    assert "the dataset has no split test" in wrong.err
