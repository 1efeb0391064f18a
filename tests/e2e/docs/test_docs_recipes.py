"""The scripts of the README and of the cookbook run as they are written there, and read every sample."""

import ast
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.cli import Ran, clean_environment
from support.programs.daemon import Daemon, private_home
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, rows
from support.stores.buckets import Bucket

ROOT = Path(__file__).parents[3]
PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "docs/cookbook.md", "docs/making-shards.md")}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon, in whose folder the scripts lie."""
    with tempfile.TemporaryDirectory(prefix="shardcache-recipes-") as root, Daemon(Path(root)) as daemon:
        for page in PAGES.values():
            for name, body in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
                (daemon.root / name).write_text(body)
        yield daemon


def run(daemon: Daemon, script: str, *arguments: Path | str) -> str:
    """Run a script in the daemon's folder; return what it printed."""
    env = clean_environment({"SHARDCACHE_SOCKET": str(daemon.socket), "OMP_NUM_THREADS": "1"})
    command = [sys.executable, script, *map(os.fspath, arguments)]
    done = subprocess.run(command, cwd=daemon.root, env=env, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_shards(daemon: Daemon, line: str, env: dict[str, str]) -> Ran:
    """Run a line of a page that begins with `shardcache write` in the daemon's folder."""
    program = f"{shlex.quote(sys.executable)} -m {line}"
    done = subprocess.run(
        program,
        shell=True,
        cwd=daemon.root,
        env=clean_environment(env),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def write(daemon: Daemon, name: str, samples: list[dict[str, bytes | str]]) -> Path:
    """Write a shard; return its path."""
    path = daemon.root / f"{name}.tar"
    path.write_bytes(make_tar(samples))
    return path


def test_first_script_needs_no_daemon(daemon: Daemon) -> None:
    """README's first script reads every sample once, on a node on which nobody set up anything."""
    (daemon.root / "first").mkdir()
    write(daemon, "first/a", [{"__key__": f"{number}", "txt": b"word"} for number in range(100)])
    with private_home(daemon.root / "first") as home:
        command = [sys.executable, "start.py", "first/a.tar"]
        done = subprocess.run(command, cwd=daemon.root, capture_output=True, text=True, timeout=GUARD_S, check=False)
        assert home.running()
    assert sum(int(line.split()[0]) for line in done.stdout.splitlines()) == 100, done.stderr


def test_images(daemon: Daemon) -> None:
    """A folder of images is written as shards; the README's script and the cookbook's decode each of them."""
    from PIL import Image

    for number in range(10):
        folder = daemon.root / "photos" / f"class-{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (500, 400), "orange").save(folder / f"{number}.jpg")
    (line,) = re.findall(r"```sh\n(shardcache write .*)\n```", PAGES["docs/cookbook.md"])
    assert write_shards(daemon, line, {}).code == 0
    assert run(daemon, "images.py", "shards/*.tar") == "10 images of 3 224 224\n"
    printed = run(daemon, "train.py", "shards/index.json")
    assert sum(map(int, re.findall(r"Size\(\[(\d+), 224, 224, 3\]\)", printed))) == 10


def test_text(daemon: Daemon) -> None:
    """Lines are packed into blocks of the context's length, each of which is read once."""
    (daemon.root / "lines.txt").write_text("".join(f"line {number}\n" for number in range(2_000)))
    tokens = sum(len(f"line {number}\n") + 1 for number in range(2_000))
    run(daemon, "pack.py", "lines.txt")
    assert run(daemon, "text.py", "text/index.json") == f"{(tokens - 1) // 1_024} blocks of 1024\n"


def test_mixture(daemon: Daemon) -> None:
    """Every batch has the proportions of its epoch; one source has more samples than it gives, the other fewer."""
    for name, count in (("web", 150), ("code", 8)):
        write(daemon, name, [{"__key__": f"{number}", "txt": b"word"} for number in range(count)])
        rows = [{"url": f"{name}.tar", "nsamples": count}]
        (daemon.root / f"{name}.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    printed = run(daemon, "mixture.py", "web.json", "code.json").splitlines()
    assert [line.partition(" ")[0] for line in printed] == sorted("012" * 5)
    assert all(ast.literal_eval(line.partition(" ")[2]) == {"web": 18, "code": 2} for line in printed[:10])
    assert all(ast.literal_eval(line.partition(" ")[2]) == {"web": 10, "code": 10} for line in printed[10:])


@pytest.mark.skipif(importlib.util.find_spec("soundfile") is None, reason="needs pip install soundfile")
def test_audio(daemon: Daemon) -> None:
    """Recordings of different lengths are batched by length, each once."""
    import numpy
    import soundfile

    samples: list[dict[str, bytes | str]] = []
    for number in range(20):
        file = io.BytesIO()
        soundfile.write(file, numpy.zeros(16_000 + 1_000 * number, dtype="float32"), 16_000, format="FLAC")
        samples.append({"__key__": f"{number}", "flac": file.getvalue(), "txt": b"word"})
    assert run(daemon, "audio.py", write(daemon, "audio", samples)) == "20 recordings\n"


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs pip install av")
def test_video(daemon: Daemon) -> None:
    """A few frames of each clip are decoded from the mapped shard."""
    import av
    import numpy

    samples: list[dict[str, bytes | str]] = []
    for number in range(5):
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as clip:
            stream = clip.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for _ in range(10):
                frame = av.VideoFrame.from_ndarray(numpy.full((48, 64, 3), 20 * number, dtype="uint8"), format="rgb24")
                clip.mux(stream.encode(frame))
            clip.mux(stream.encode())
        samples.append({"__key__": f"{number}", "mp4": file.getvalue()})
    assert run(daemon, "video.py", write(daemon, "video", samples)) == "5 clips of 4 48 64 3\n"


def test_making_shards(daemon: Daemon, moto: Bucket) -> None:
    """The page's commands and program run as they are written there, on inputs of those names."""
    import pyarrow
    import pyarrow.parquet

    for name in ("photos/cat/1.jpg", "photos/dog/2.jpg"):
        (daemon.root / name).parent.mkdir(parents=True, exist_ok=True)
        (daemon.root / name).write_bytes(b"jpeg")
    (daemon.root / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"1"], "caption": ["a"]}), daemon.root / "data" / "1.parquet")
    (daemon.root / "corpus.jsonl").write_text('{"text": "a"}\n')
    lines = re.findall(r"^shardcache write .*$", PAGES["docs/making-shards.md"], re.MULTILINE)
    for line in lines:
        ran = write_shards(daemon, line.replace("s3://YOUR-BUCKET", moto.url).replace(" text/", " lines/"), moto.env())
        assert ran.code == 0, ran.err
    assert len(lines) == 3
    run(daemon, "make.py", "made")
    assert sum(row["nsamples"] for row in rows(daemon.root / "made")) == 1_000
