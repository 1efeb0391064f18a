"""The examples in docs/, run over uneven shards in S3, and what they must achieve."""

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from pathlib import Path

from PIL import Image

from support import ROOT
from support.programs.cli import clean_environment, shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar
from support.stores.buckets import Bucket, MotoS3, keys_of

EXAMPLES = ROOT / "docs" / "examples"
TRAINING = (5, 11, 3, 8, 1, 13, 6)
LONG = (50, 110, 30, 80, 10, 130, 60)  # so that a job can be killed before its first epoch is over
VALIDATION = (4, 7, 2)
BATCH = 4
EPOCHS = 3
RANKS = 2

_ABORTED = "terminate called without an active exception"

Rank = list[list[str]]  # the keys of each of its batches
Reports = dict[str, list[Rank]]  # by the report's name


def is_aborted_by_torch(said: str) -> bool:
    """Tell whether torch ended a process at its exit (pytorch#190489), after its work."""
    return _ABORTED in said and sys.version_info < (3, 14)


@contextmanager
def counted_shards(server: MotoS3) -> Iterator[Daemon]:
    """Run a daemon with the shards in its store, their samples counted.

    Other tests of the server may have put other objects into the bucket that the examples name.
    """
    server.make_bucket("bucket")
    for key in keys_of(Bucket(server, "bucket")):
        server.client.delete_object(Bucket="bucket", Key=key)
    for name, counts in (("train", TRAINING), ("long", LONG), ("val", VALIDATION)):
        put_shards(server, name, counts)
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-ways-") as root,
        Daemon(Path(root), env=server.env()) as it,
    ):
        folders = [f"s3://bucket/{name}/" for name in ("train", "long", "val")]
        assert shardcache("warm", *folders, socket=it.socket).code == 0
        yield it


def put_shards(server: MotoS3, name: str, counts: tuple[int, ...]) -> None:
    """Store shards of so many samples with image and class 0 to 9, and their index file."""
    for number in range(len(counts)):
        keys = range(sum(counts[:number]), sum(counts[: number + 1]))
        tar = make_tar(
            [
                {"__key__": f"{key:06d}", "jpg": jpeg(key), "cls": str(key % 10).encode()}
                for key in keys
            ]
        )
        server.put("bucket", f"{name}/{number}.tar", tar)
    rows = [
        {"url": f"{name}/{number}.tar", "nsamples": count} for number, count in enumerate(counts)
    ]
    server.put(
        "bucket", f"{name}.json", json.dumps({"wids_version": 1, "shardlist": rows}).encode()
    )


def jpeg(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number % 256, 2 * number % 256, -number % 256)).save(file, "JPEG")
    return file.getvalue()


def run(daemon: Daemon, out: Path, *command: str, limit_s: float = GUARD_S) -> Reports:
    """Run an example; return what it reported: by the report's name, what each rank was given."""
    finish(start(daemon, out, command), limit_s)
    return reports(out)


def run_ranks(
    daemon: Daemon, out: Path, *ranks: tuple[Sequence[str], Mapping[str, str]]
) -> Reports:
    """Run an example in a process for each rank; return what they reported."""
    outs = [out.with_name(f"{out.name}-{rank}") for rank in range(len(ranks))]
    jobs = [start(daemon, path, *each) for path, each in zip(outs, ranks, strict=True)]
    try:
        for job in jobs:
            finish(job, GUARD_S)
    finally:
        for job in jobs:
            job.kill()
    each = [reports(path) for path in outs]
    return {name: [rank[name][0] for rank in each] for name in each[0]}


def start(
    daemon: Daemon, out: Path, command: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command, "--socket", str(daemon.socket), "--out", str(out)],
        cwd=EXAMPLES,
        env=clean_environment({"OMP_NUM_THREADS": "1", **(env or {})}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str], limit_s: float) -> None:
    """Wait until an example has ended, without an error.

    One error is torch's own (pytorch/pytorch#190489): before Python 3.14, a thread of its process
    group that frees a tensor while the interpreter ends aborts the process. All reports have been
    written by then, and are compared.
    """
    try:
        said, _ = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        job.terminate()  # a launcher that is killed would leave its ranks behind
        said, _ = job.communicate()
    assert job.returncode == 0 or is_aborted_by_torch(said), said


def reports(out: Path) -> Reports:
    """Return what an example's ranks reported to a file, each in its own time."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found: Reports = {row["name"]: [] for row in rows}
    for row in sorted(rows, key=itemgetter("rank")):
        found[row["name"]].append(row["batches"])
    return found


def check_usage(daemon: Daemon, folder: Path, script: str) -> None:
    """Run the lines of an example's docstring with nothing but the example in the folder."""
    shutil.copy(EXAMPLES / script, folder)
    usage = ast.get_docstring(ast.parse((EXAMPLES / script).read_text())) or ""
    lines = re.findall(
        r"^(?:export|python|torchrun|accelerate) (?:.*\\\n)*.*$", usage, re.MULTILINE
    )
    assert lines
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = clean_environment(
        {"OMP_NUM_THREADS": "1", "SHARDCACHE_SOCKET": str(daemon.socket), "PATH": paths}
    )
    exports = [line for line in lines if line.startswith("export")]
    for line in lines[len(exports) :]:
        command = ["sh", "-ec", "\n".join([*exports, line])]
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        finish(job, GUARD_S)


def torchrun(script: str, *, ranks: int = RANKS) -> list[str]:
    """Return the command that starts an example on all ranks."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", script]


def check(ranks: list[Rank], counts: tuple[int, ...]) -> None:
    """Check an epoch: equal steps and sizes, every sample, and no needless repetition."""
    assert len(ranks) == RANKS
    assert len({tuple(map(len, rank)) for rank in ranks}) == 1
    reads = Counter(chain.from_iterable(chain.from_iterable(ranks)))
    assert sorted(reads) == [f"{number:06d}" for number in range(sum(counts))]
    assert reads.total() - len(reads) == -sum(counts) % RANKS


def check_epochs(epochs: Reports, readers: int = RANKS) -> None:
    """Check training without validation: every sample in each epoch, in another order each time.

    Args:
        readers: number of equal shares, of which the last samples may come twice.
    """
    assert list(epochs) == [f"epoch {epoch}" for epoch in range(EPOCHS)]
    for ranks in epochs.values():
        reads = Counter(chain.from_iterable(chain.from_iterable(ranks)))
        assert sorted(reads) == [f"{number:06d}" for number in range(sum(TRAINING))]
        assert reads.total() - len(reads) == -sum(TRAINING) % readers
    assert epochs["epoch 0"] != epochs["epoch 1"] != epochs["epoch 2"]


def check_rest(epochs: Reports, rest: Reports, steps: int) -> None:
    """Check a run resumed in its second epoch: the very next batches, then the third epoch."""
    assert rest == {
        "epoch 1": [rank[steps:] for rank in epochs["epoch 1"]],
        "epoch 2": epochs["epoch 2"],
    }


def check_resumed(
    daemon: Daemon, folder: Path, command: list[str], checkpoint: Callable[[int], str]
) -> Reports:
    """Run an example, then resume it in its second epoch; return the first run's reports.

    Args:
        checkpoint: names that of a step, counted over all epochs, below the folder of
            `--checkpoints`.
    """
    saved = folder / "saved"
    command = [
        *command,
        "s3://bucket/train/",
        "--validation",
        "s3://bucket/val/",
        "--checkpoints",
        str(saved),
    ]
    epochs = run(daemon, folder / "out", *command)
    for epoch in range(EPOCHS):
        check(epochs[f"epoch {epoch} training"], TRAINING)
        check(epochs[f"epoch {epoch} validation"], VALIDATION)
    steps = len(epochs["epoch 0 training"][0])
    resumed = run(
        daemon, folder / "resumed", *command, "--resume", str(saved / checkpoint(steps + 3))
    )
    assert "epoch 0 training" not in resumed
    assert resumed["epoch 1 training"] == [rank[3:] for rank in epochs["epoch 1 training"]]
    assert resumed["epoch 2 training"] == epochs["epoch 2 training"]
    return epochs
