"""Small inputs that stand for a lot: the peak of memory of the daemon and of the processes that it
started over each, and whether it continues answering.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from campaign.harness import Result, Row, scaled
from shardcache.shared.lists.shardlist import MAX_SHARDS
from shardcache.store.codecs import Codec
from support.programs.daemon import Daemon, eventually
from support.programs.processes import children
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples, with_window

_MIB = 1024 * 1024
_INDEX_BYTES = 24 * _MIB
_MANIFEST = 1_000_000
_PLAN_MEMORY_BYTES = 1024 * _MIB
_LEAST_PLAN_MEMORY_BYTES = 8 * _MIB
_POSITIONS = 100_000
# What a shard takes while a manifest of it is made and sent: its url and row twice, once as text.
_SHARD_BYTES = 600
_SLACK_BYTES = 48 * _MIB
_LIMIT_S = 300.0
# Processes that a daemon starts: two transport workers, one of them later, and one that indexes.
_HELPERS = 3
# The longest that the daemon may owe an answer to a health check, on a machine with other work.
_SILENT_S = 2.0


Send = Callable[[Daemon, Path, int], str]
"""Sends an input at a size, and returns the error code or the type of the answer."""


@dataclass(frozen=True, slots=True)
class Ground:
    """A daemon, and a folder for inputs."""

    daemon: Daemon
    folder: Path
    plan_memory_bytes: int


@contextlib.contextmanager
def ground(folder: Path, scale: float) -> Iterator[Ground]:
    plan_memory_bytes = scaled(_PLAN_MEMORY_BYTES, scale, _LEAST_PLAN_MEMORY_BYTES)
    with Daemon(folder, "--plan-memory", str(plan_memory_bytes), "--log-level", "error") as daemon:
        eventually(lambda: len(children(daemon.pid)) >= _HELPERS)
        seen_bytes = [0]

        def has_settled() -> bool:
            seen_bytes.append(_memory(daemon, "VmRSS"))
            return seen_bytes[-1] == seen_bytes[-2]

        eventually(has_settled, pause_s=0.3)  # what its helpers take to start is not of any input
        yield Ground(daemon, folder, plan_memory_bytes)


def given(
    send: Send,
    allowed: Callable[[Ground, int], int],
    expected: str,
    ground: Ground,
    result: Result,
    scale: float,
) -> None:
    """Send one input; the daemon may grow by the allowed bytes, and answers health checks."""
    size = scaled(_MANIFEST, scale, _MANIFEST // 20)
    before_bytes = _reset_peak(ground.daemon)
    with _watched(ground.daemon) as silent_s:
        answer = send(ground.daemon, ground.folder, size)
    grown_bytes = _memory(ground.daemon, "VmHWM") - before_bytes
    figures = f"{grown_bytes / _MIB:.0f} MiB, {max(silent_s):.2f} s silent"
    result.fault = f"{result.fault} ({figures})"
    result.injected = 1
    if answer != expected:
        result.fail("untyped", f"{answer} and not {expected}")
    if grown_bytes > allowed(ground, size) + _SLACK_BYTES:
        result.fail("wrong", f"the daemon grew by {figures}")
    if max(silent_s) > _SILENT_S:
        result.fail("hangs", figures)


def _reset_peak(daemon: Daemon) -> int:
    """Begin to measure again (proc(5), clear_refs); return what the processes have now."""
    for pid in (daemon.pid, *children(daemon.pid)):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(daemon, "VmRSS")


def _memory(daemon: Daemon, name: str) -> int:
    lines = [
        line
        for pid in (daemon.pid, *children(daemon.pid))
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    ]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextlib.contextmanager
def _watched(daemon: Daemon) -> Iterator[list[float]]:
    """Ask for the daemon's health all the while; yield how long each answer took."""
    took_s = [0.0]
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.02):
            begun_s = time.monotonic()
            daemon.request("GET", "/v1/health")
            took_s.append(time.monotonic() - begun_s)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield took_s
    finally:
        stop.set()
        thread.join()


def _window(codec: Codec, daemon: Daemon, folder: Path, _size: int) -> str:
    shard = folder / f"window.tar.{'xz' if codec is Codec.XZ else 'zst'}"
    shard.write_bytes(with_window(codec, make_tar(random_samples(10)), 29))
    lines = daemon.request("POST", "/v1/warm", {"urls": [f"file://{shard}"]}).splitlines()
    errors = [line["error"] for line in map(json.loads, lines) if line.get("event") == "error"]
    return str(errors[0]["code"]) if errors else "fetched"


def _brackets(daemon: Daemon, folder: Path, _size: int) -> str:
    index = folder / "index.json"
    index.write_bytes(f'{{"shardlist": [{",".join(["[]"] * (_INDEX_BYTES // 3))}]}}'.encode())
    return _resolved(daemon, f"file://{index}")


def _braces(daemon: Daemon, _folder: Path, count: int) -> str:
    return _resolved(daemon, f"s3://bucket/train-{{0000000..{count - 1:07d}}}.tar")


def _too_many_braces(daemon: Daemon, folder: Path, _size: int) -> str:
    return _braces(daemon, folder, MAX_SHARDS + 1)


def _resolved(daemon: Daemon, url: str) -> str:
    with RawSession(daemon) as session:
        session.send(type="resolve", id=1, urls=[url])
        answer = session.receive_text(_LIMIT_S)
        return "manifest" if b'"type":"manifest"' in answer[:100] else _outcome(json.loads(answer))


def _endless_plan(daemon: Daemon, _folder: Path, _size: int) -> str:
    with RawSession(daemon) as session:
        answer = session.plan(["s3://bucket/a.tar"], [0])
        while answer["type"] == "ok":
            answer = session.ask("extend", order=[0] * _POSITIONS)
        return _outcome(answer)


def _outcome(answer: dict[str, Any]) -> str:
    return str(answer["error"]["code"] if answer["type"] == "error" else answer["type"])


def _row(
    name: str, send: Send, expected: str, allowed: Callable[[Ground, int], int] = lambda *_: 0
) -> Row:
    return Row(name, partial(given, send, allowed, expected))


ROWS = (
    *(
        _row(
            f"{codec.value} with a window of 512 MiB", partial(_window, codec), "unsupported_shard"
        )
        for codec in (Codec.XZ, Codec.ZSTD)
    ),
    _row("index of brackets", _brackets, "not_an_index", lambda *_: 5 * _INDEX_BYTES),
    _row("braces for a shard too many", _too_many_braces, "config"),
    _row("braces for many shards", _braces, "manifest", lambda _, size: _SHARD_BYTES * size),
    _row("plan without end", _endless_plan, "capacity", lambda ground, _: ground.plan_memory_bytes),
)
