"""The scripts and commands of the README and of the pages for newcomers run as they are written there."""

import ast
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.network.ports import free_port
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon, private_home
from support.programs.guard import GUARD_S
from support.shards.reading import write_index
from support.shards.tars import make_tar, rows
from support.stores.buckets import Bucket

ROOT = Path(__file__).parents[3]
NAMES = ("README.md", "docs/cookbook.md", "docs/making-shards.md", "docs/first-steps.md", "docs/coming-from.md")
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
SAMPLES = 4_000

pytestmark = pytest.mark.slow

# What `aws s3 cp s3://… -` does, for the one script that calls it.
AWS = """#!{python}
import os, sys, urllib.request
url = os.environ["AWS_ENDPOINT_URL"] + "/" + sys.argv[3].removeprefix("s3://")
signed = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=any"
asked = urllib.request.Request(url, headers={{"Authorization": signed}})
sys.stdout.buffer.write(urllib.request.urlopen(asked).read())
"""


def write_scripts(folder: Path, *pages: str) -> None:
    """Write every script of pages under the name in its first line."""
    for page in pages:
        for name, body in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGES[page], re.DOTALL):
            (folder / name).write_text(body)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with the pages' scripts, and the environment of what reads through its daemon."""

    folder: Path
    env: dict[str, str]

    def run(self, line: str, more: Mapping[str, str] | None = None) -> str:
        """Run a command line of a page, with further variables; return what it printed."""
        words = [program(word) for word in shlex.split(line)]
        env = self.env | dict(more or {})
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=GUARD_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def write(self, name: str, samples: list[dict[str, bytes | str]]) -> str:
        """Write a shard; return its name."""
        (self.folder / f"{name}.tar").write_bytes(make_tar(samples))
        return f"{name}.tar"


def program(word: str) -> str:
    """Return a program of the page's virtual environment as it is named in this one."""
    is_one = word.startswith("venv/bin/") or word == "python"
    return str(Path(sys.executable).with_name(word.removeprefix("venv/bin/"))) if is_one else word


def lines(page: str, section: str) -> list[str]:
    """Return the command lines of a section."""
    text = PAGES[page].partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def line_with(words: str, section: str = "Without a bucket") -> str:
    """Return the only line of the first page's section that has these words."""
    (found,) = [line for line in lines("docs/first-steps.md", section) if words in line]
    return found


@contextmanager
def store(place: Place) -> Iterator[None]:
    """Run `store.py` until the end."""
    command = [program(word) for word in line_with("store.py").split()]
    process = subprocess.Popen(command, cwd=place.folder, env=place.env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("s3://first-steps/")
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def first_steps() -> Iterator[tuple[Place, dict[str, str]]]:
    """The servers that the first page names, on a port that is free; and the store's address and keys."""
    with tempfile.TemporaryDirectory(prefix="shardcache-docs-") as root:
        port, folder = str(free_port()), Path(root)
        write_scripts(folder, "docs/first-steps.md", "docs/coming-from.md")
        for script in folder.glob("*.py"):
            script.write_text(script.read_text().replace("9500", port))
        (folder / "aws").write_text(AWS.format(python=sys.executable))
        (folder / "aws").chmod(0o755)
        serve = line_with("serve").replace("9500", port).split()
        keys = dict(word.split("=", 1) for word in serve if word.startswith("AWS_"))
        flags = serve[serve.index("serve") + 1 :]
        env = clean_environment({"PATH": f"{root}:{os.environ['PATH']}", "SHARDCACHE_SOCKET": f"{root}/s.sock"})
        place = Place(folder, {name: value for name, value in env.items() if not name.startswith("AWS_")})
        assert flags[:2] == ["--cache-dir", "./cache"]  # the daemon of tests lies there, too
        with store(place), Daemon(folder, *flags[2:], env=keys):
            yield place, keys


def test_first_steps_without_a_bucket(first_steps: tuple[Place, dict[str, str]]) -> None:
    """The newcomer's training loop reads every sample in each epoch, from brace pattern and from index file."""
    place, _ = first_steps
    printed = place.run(line_with("train.py"))
    assert [int(count) for count in re.findall(r"epoch \d: (\d+) samples", printed)] == 3 * [SAMPLES]
    own = "With a bucket of your own"
    index = line_with("index ", own).replace("YOUR-BUCKET", "first-steps").replace("000099", "000015")
    assert f"{SAMPLES:,} samples" in place.run(index)
    assert printed.count(f": {SAMPLES} samples") == place.run(line_with("train.py", own)).count(f": {SAMPLES} samples")


@pytest.mark.parametrize("loader", ["webdataset", "s3fs"])
def test_scripts_before_and_after_read_the_same(first_steps: tuple[Place, dict[str, str]], loader: str) -> None:
    """Both scripts of a pair read the whole dataset, the one through the daemon without any credentials."""
    place, keys = first_steps
    assert place.run(f"python before_{loader}.py", keys) == f"{SAMPLES} samples\n"
    assert place.run(f"python after_{loader}.py") == f"{SAMPLES} samples\n"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """The scripts of the README and of the cookbook, and a daemon."""
    with tempfile.TemporaryDirectory(prefix="shardcache-recipes-") as root, Daemon(Path(root)) as daemon:
        write_scripts(Path(root), "README.md", "docs/cookbook.md", "docs/making-shards.md")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = clean_environment({"PATH": path, "SHARDCACHE_SOCKET": str(daemon.socket), "OMP_NUM_THREADS": "1"})
        yield Place(Path(root), env)


def test_first_script_needs_no_daemon(place: Place) -> None:
    """README's first script reads every sample once, on a node on which nobody set up anything."""
    (place.folder / "first").mkdir()
    place.write("first/a", [{"__key__": f"{number}", "txt": b"word"} for number in range(100)])
    with private_home(place.folder / "first") as home:
        printed = Place(place.folder, dict(os.environ)).run("python start.py first/a.tar")
        assert home.running()
    assert sum(int(line.split()[0]) for line in printed.splitlines()) == 100


def test_images(place: Place) -> None:
    """A folder of images is written as shards; the README's script and the cookbook's decode each of them."""
    from PIL import Image

    for number in range(10):
        folder = place.folder / "photos" / f"class-{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (500, 400), "orange").save(folder / f"{number}.jpg")
    (line,) = re.findall(r"```sh\n(shardcache write .*)\n```", PAGES["docs/cookbook.md"])
    place.run(line)
    assert place.run("python images.py shards/*.tar") == "10 images of 3 224 224\n"
    printed = place.run("python train.py shards/index.json")
    assert sum(map(int, re.findall(r"Size\(\[(\d+), 224, 224, 3\]\)", printed))) == 10


def test_text(place: Place) -> None:
    """Lines are packed into blocks of the context's length, each of which is read once."""
    (place.folder / "lines.txt").write_text("".join(f"line {number}\n" for number in range(2_000)))
    tokens = sum(len(f"line {number}\n") + 1 for number in range(2_000))
    place.run("python pack.py lines.txt")
    assert place.run("python text.py text/index.json") == f"{(tokens - 1) // 1_024} blocks of 1024\n"


def test_mixture(place: Place) -> None:
    """Every batch has the proportions of its epoch; one source has more samples than it gives, the other fewer."""
    for name, count in (("web", 150), ("code", 8)):
        (place.folder / name).mkdir()
        place.write(f"{name}/0", [{"__key__": f"{number}", "txt": b"word"} for number in range(count)])
        write_index(place.folder / name, [count])
    printed = place.run("python mixture.py web/index.json code/index.json").splitlines()
    assert [line.partition(" ")[0] for line in printed] == sorted("012" * 5)
    assert all(ast.literal_eval(line.partition(" ")[2]) == {"web": 18, "code": 2} for line in printed[:10])
    assert all(ast.literal_eval(line.partition(" ")[2]) == {"web": 10, "code": 10} for line in printed[10:])


@pytest.mark.skipif(importlib.util.find_spec("soundfile") is None, reason="needs pip install soundfile")
def test_audio(place: Place) -> None:
    """Recordings of different lengths are batched by length, each once."""
    import numpy
    import soundfile

    samples: list[dict[str, bytes | str]] = []
    for number in range(20):
        file = io.BytesIO()
        soundfile.write(file, numpy.zeros(16_000 + 1_000 * number, dtype="float32"), 16_000, format="FLAC")
        samples.append({"__key__": f"{number}", "flac": file.getvalue(), "txt": b"word"})
    assert place.run(f"python audio.py {place.write('audio', samples)}") == "20 recordings\n"


@pytest.mark.skipif(importlib.util.find_spec("av") is None, reason="needs pip install av")
def test_video(place: Place) -> None:
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
    assert place.run(f"python video.py {place.write('video', samples)}") == "5 clips of 4 48 64 3\n"


def test_making_shards(place: Place, moto: Bucket) -> None:
    """The page's commands and program run as they are written there, on inputs of those names."""
    import pyarrow
    import pyarrow.parquet

    for name in ("photos/cat/1.jpg", "photos/dog/2.jpg"):
        (place.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (place.folder / name).write_bytes(b"jpeg")
    (place.folder / "data").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"1"], "caption": ["a"]}), place.folder / "data" / "1.parquet")
    (place.folder / "corpus.jsonl").write_text('{"text": "a"}\n')
    commands = re.findall(r"^shardcache write .*$", PAGES["docs/making-shards.md"], re.MULTILINE)
    assert len(commands) == 3
    for line in commands:
        line = line.replace("s3://YOUR-BUCKET", moto.url).replace(" text/", " lines/")
        place.run(f"sh -c {shlex.quote(line)}", moto.env())
    place.run("python make.py made")
    assert sum(row["nsamples"] for row in rows(place.folder / "made")) == 1_000
