"""Programs that the benchmark compares downloads with: each downloads all objects, and its cost is measured."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from benchmarks.downloads.downloaders import PART_BYTES, TOOLS, Task
from benchmarks.measure import python, run, thread_cpu_s
from support.stores.throttled_s3 import ThrottledS3

OBJECTS = {"large/a.tar": bytes(PART_BYTES) + b"end", "large/b.tar": b"b" * 1000}

WORK_S = 0.1
# The kernel tells user and system time in hundredths of a second, each rounded down.
TICKS_S = 0.02


@pytest.mark.parametrize("tool", TOOLS)
def test_a_peer_downloads_everything(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one part and of two arrive complete; the costs are those of a real download."""
    if tool != "awscrt":  # of these, the daemon's own dependency
        pytest.importorskip(tool)
    monkeypatch.chdir(Path(__file__).parents[2])  # where -m finds the benchmark
    for key, body in OBJECTS.items():
        path = tmp_path / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    (tmp_path / "files").mkdir()
    task = Task(tool, "bucket", {key: len(body) for key, body in OBJECTS.items()}, str(tmp_path / "files"))
    with ThrottledS3(tmp_path, first_byte_s=0) as store:
        spent = json.loads(
            run(python("downloads.downloaders", task.to_json()), {"AWS_REGION": "us-east-1", **store.env()}).output
        )
    assert {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()} == {
        Path(key).name: body for key, body in OBJECTS.items()
    }
    assert min(spent["wall_s"], spent["cpu_s"]) > 0


def test_processor_time_is_distinguished_by_thread() -> None:
    """Of two threads the one that works is the busier one, by the time it worked."""
    worked, release = threading.Event(), threading.Event()

    def work() -> None:
        while time.thread_time() < WORK_S:
            pass
        worked.set()
        release.wait()

    worker, idler = threading.Thread(target=work), threading.Thread(target=release.wait)
    worker.start()
    idler.start()
    worked.wait()
    spent_s = thread_cpu_s(os.getpid())
    release.set()
    worker.join()
    idler.join()
    assert spent_s[worker.native_id or 0] >= WORK_S - TICKS_S
    assert spent_s[idler.native_id or 0] <= TICKS_S
