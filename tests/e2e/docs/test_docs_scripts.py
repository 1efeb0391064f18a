"""The scripts and commands of the pages run as they are written there."""

import ast
import importlib.util
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from shardcache_client import ShardDataset
from support import ROOT
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon
from support.programs.examples import jpeg
from support.programs.pages import Place
from support.shards.reading import write_index
from support.shards.tars import make_tar, rows
from support.stores.buckets import Bucket, MotoS3

NAMES = ("docs/how-do-i.md", "docs/making-shards.md")
PAGES = {name: (ROOT / name).read_text() for name in (*NAMES, "docs/coming-from.md")}
QUESTIONS = dict(
    re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", PAGES["docs/how-do-i.md"], re.MULTILINE | re.DOTALL)
)

pytestmark = pytest.mark.slow

# What `aws s3 cp s3://… -` and `aws s3 sync s3://… FOLDER` do, for the scripts that call them.
AWS = """#!{python}
import os, pathlib, sys, urllib.request
scope = "any/20260101/us-east-1/s3/aws4_request"
signed = f"AWS4-HMAC-SHA256 Credential={{scope}}, SignedHeaders=host, Signature=any"
source = os.environ["AWS_ENDPOINT_URL"] + "/" + sys.argv[3].removeprefix("s3://")
def body(url):
    request = urllib.request.Request(url, headers={{"Authorization": signed}})
    return urllib.request.urlopen(request).read()
if sys.argv[2] == "cp":
    sys.stdout.buffer.write(body(source))
else:
    (folder := pathlib.Path(sys.argv[4])).mkdir(exist_ok=True)
    for name in (f"train-{{shard:06d}}.tar" for shard in range(16)):
        (folder / name).write_bytes(body(f"{{source}}/{{name}}"))
"""

# Its examples import torchvision, which PyPI builds for CUDA alone.
MOSAICML = f"""python -c "
import runpy, sys
sys.path.append('{ROOT}/tests')
from benchmarks.peers import mosaicml
mosaicml()
runpy.run_path('before_mosaicml.py', run_name='__main__')
" """


@pytest.fixture(scope="module")
def before_and_after(moto_server: MotoS3) -> Iterator[Place]:
    """The scripts of the page for users of other loaders, their shards, and a daemon."""
    moto_server.make_bucket("first-steps")
    for shard in range(16):
        samples = [
            {"__key__": f"{shard}-{number}", "bin": b"pixels", "cls": b"1"} for number in range(20)
        ]
        moto_server.put("first-steps", f"train-{shard:06d}.tar", make_tar(samples))
    env = moto_server.env()
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-docs-") as root,
        Daemon(Path(root), env=env) as daemon,
    ):
        (Path(root) / "aws").write_text(AWS.format(python=sys.executable))
        (Path(root) / "aws").chmod(0o755)
        path = f"{root}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = clean_environment({"PATH": path, "SHARDCACHE_SOCKET": str(daemon.socket)})
        place = Place(
            Path(root), {name: value for name, value in env.items() if not name.startswith("AWS_")}
        )
        place.write_scripts("docs/coming-from.md")
        yield place


@pytest.mark.parametrize("loader", re.findall(r"# before_(\w+)\.py", PAGES["docs/coming-from.md"]))
def test_scripts_before_and_after_read_the_same(
    before_and_after: Place, moto_server: MotoS3, loader: str
) -> None:
    """Both scripts of a pair read the whole dataset, ours without any credentials."""
    place = before_and_after
    for name, env in ((f"after_{loader}.py", {}), (f"before_{loader}.py", moto_server.env())):
        script = place.folder / name
        if not script.exists():  # the page has one for several loaders
            continue
        for module in re.findall(r"^(?:from|import) ([\w.]+)", script.read_text(), re.MULTILINE):
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                pytest.skip(f"{name} needs {module}: see `make ecosystem`")
        command = MOSAICML if name == "before_mosaicml.py" else f"python {name}"
        assert place.run(command, env).splitlines()[-1] == "320 samples"


@pytest.fixture(scope="module")
def place(moto_server: MotoS3) -> Iterator[Place]:
    """The pages' scripts, the data and bucket for the questions' blocks, and a daemon."""
    env = moto_server.env()
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-recipes-") as root,
        Daemon(Path(root), "--s3", "127.0.0.1:0", env=env) as daemon,
    ):
        fill_bucket(moto_server)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = clean_environment(
            {"PATH": path, "SHARDCACHE_SOCKET": str(daemon.socket), "OMP_NUM_THREADS": "1"}
        )
        place = Place(Path(root), env)
        place.write_scripts(*NAMES)
        (line,) = re.findall(r"^shardcache demo .*$", PAGES["docs/how-do-i.md"], re.MULTILINE)
        place.run(line)
        yield place


def fill_bucket(server: MotoS3) -> None:
    """Store samples for training and validation, captions as their own shards, and two files."""
    server.make_bucket("bucket")
    for name, counts in (("train", (25, 25, 25, 25)), ("val", (4, 7))):
        rows = [
            {"url": f"{shard:06d}.tar", "nsamples": count} for shard, count in enumerate(counts)
        ]
        server.put(
            "bucket",
            f"{name}/index.json",
            json.dumps({"wids_version": 1, "shardlist": rows}).encode(),
        )
        for shard, count in enumerate(counts):
            keys = range(sum(counts[:shard]), sum(counts[:shard]) + count)
            photos = [
                {
                    "__key__": f"{key:06d}",
                    "jpg": jpeg(key),
                    "txt": b"a photo",
                    "cls": b"%d" % (key % 10),
                }
                for key in keys
            ]
            captions = [{"__key__": photo["__key__"], "txt": photo["txt"]} for photo in photos]
            server.put("bucket", f"{name}/{shard:06d}.tar", make_tar(photos))
            server.put("bucket", f"captions/{name}-{shard:06d}.tar", make_tar(captions))
    for name, write in (
        ("model.pt", partial(torch.save, {"weight": torch.ones(3)})),
        ("table.parquet", write_table),
    ):
        file = io.BytesIO()
        write(file)
        server.put("bucket", name, file.getvalue())


def write_table(file: io.BytesIO) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3]}), file)


@pytest.mark.parametrize("question", QUESTIONS)
def test_answer_runs_and_prints_what_its_comments_say(
    place: Place, question: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of a question in turn. Scripts with an argument have tests of their own."""
    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("SHARDCACHE_SOCKET", place.env["SHARDCACHE_SOCKET"])
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGES["docs/how-do-i.md"], re.DOTALL)[0], names)
    blocks = re.findall(
        r"^```(python|sh|toml)\n(.*?)^```", QUESTIONS[question], re.MULTILINE | re.DOTALL
    )
    assert blocks
    for language, block in blocks:
        expected = re.findall(r"^(?: *print\(|\S.*\.py).*  # (.*)$", block, re.MULTILINE)
        if language == "sh":
            printed = [place.run(line) for line in block.splitlines()]
            assert not expected or "".join(printed).splitlines() == expected
        elif language == "python" and not re.match(r"# \w+\.py\n", block):
            if "import duckdb" in block:
                pytest.importorskip("duckdb", reason="needs pip install duckdb")
            exec(block, names)
            assert expected
            assert capsys.readouterr().out.splitlines() == expected


def test_images(place: Place) -> None:
    """A folder of images is written as shards, whose images the page's script decodes."""
    (line,) = re.findall(r"^shardcache write .*$", QUESTIONS["write shards?"], re.MULTILINE)
    place.run(line)
    assert place.run("python images.py shards/*.tar") == "600 images of 3 224 224\n"


def test_text(place: Place) -> None:
    """Lines are packed into blocks of the context's length, each of which is read once."""
    tokens = sum(len(f"line {number}\n") + 1 for number in range(2_000))
    place.run("python pack.py data/lines.txt")
    output = place.run("python text.py text/index.json")
    assert output == f"{(tokens - 1) // 1_024} blocks of 1024\n"


def test_mixture(place: Place) -> None:
    """Every batch has its epoch's proportions, with one source too large and one too small."""
    for name, count in (("web", 150), ("code", 8)):
        (place.folder / name).mkdir()
        place.write(
            f"{name}/0", [{"__key__": f"{number}", "txt": b"word"} for number in range(count)]
        )
        write_index(place.folder / name, [count])
    printed = place.run("python mixture.py web/index.json code/index.json").splitlines()
    assert [line.partition(" ")[0] for line in printed] == sorted("012" * 5)
    assert all(
        ast.literal_eval(line.partition(" ")[2]) == {"web": 18, "code": 2} for line in printed[:10]
    )
    assert all(
        ast.literal_eval(line.partition(" ")[2]) == {"web": 10, "code": 10} for line in printed[10:]
    )


@pytest.mark.skipif(
    importlib.util.find_spec("soundfile") is None, reason="needs pip install soundfile"
)
def test_audio(place: Place) -> None:
    """Recordings of different lengths are batched by length, each once."""
    import numpy
    import soundfile

    samples: list[dict[str, bytes | str]] = []
    for number in range(20):
        file = io.BytesIO()
        soundfile.write(
            file, numpy.zeros(16_000 + 1_000 * number, dtype="float32"), 16_000, format="FLAC"
        )
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
            stream.width = 64
            stream.height = 48
            stream.pix_fmt = "yuv420p"
            for _ in range(10):
                frame = av.VideoFrame.from_ndarray(
                    numpy.full((48, 64, 3), 20 * number, dtype="uint8"), format="rgb24"
                )
                clip.mux(stream.encode(frame))
            clip.mux(stream.encode())
        samples.append({"__key__": f"{number}", "mp4": file.getvalue()})
    assert place.run(f"python video.py {place.write('video', samples)}") == "5 clips of 4 48 64 3\n"


def test_making_shards(place: Place, moto: Bucket) -> None:
    """The page's commands and program run as they are written there, on inputs of those names."""
    for name in ("photos/cat/1.jpg", "photos/dog/2.jpg"):
        (place.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (place.folder / name).write_bytes(b"jpeg")
    (place.folder / "data").mkdir(exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table({"image": [b"1"], "caption": ["a"]}), place.folder / "data" / "1.parquet"
    )
    (place.folder / "corpus.jsonl").write_text('{"text": "a"}\n')
    commands = re.findall(r"^shardcache write .*$", PAGES["docs/making-shards.md"], re.MULTILINE)
    assert len(commands) == 3
    for line in commands:
        line = line.replace("s3://YOUR-BUCKET", moto.url).replace(" text/", " lines/")
        place.run(line, moto.env())
    place.run("python make.py made")
    assert sum(row["nsamples"] for row in rows(place.folder / "made")) == 1_000


def test_the_page_about_waiting_explains_each_share(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its script prints the shares that it says, and its table has a row for each."""
    page = (ROOT / "docs" / "why-waiting.md").read_text()
    script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    dataset = ShardDataset(
        "s3://bucket/train/index.json", batch_size=8, socket=place.env["SHARDCACHE_SOCKET"]
    )
    exec(script, {"loader": dataset.loader(num_workers=0)})

    printed = capsys.readouterr().out
    assert printed.strip() == script.rpartition("  # ")[2].strip()
    rows = re.findall(r"^\| ([a-z, ]+) \|", page, re.MULTILINE)
    explained = {share for row in rows for share in row.split(", ")}
    assert set(printed.split()) - explained == set()
