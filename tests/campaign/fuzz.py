"""Hostile input: a million inputs for all that reads bytes from elsewhere, guided by coverage."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from campaign.fuzzing.fuzz_targets import FOLDER, TARGETS, kept
from campaign.harness import Result, Row, scaled
from support.programs.guard import GUARD_S

# Inputs at scale 1, and the seconds they may take.
_RUNS = {
    "session": (15_000, 240),
    "arriving": (80_000, 120),
    "sidecar": (120_000, 120),
    "answers": (40_000, 120),
    "tar": (350_000, 240),
    "message": (900_000, 300),
}
_LEAST_RUNS = 150
_MOST_BYTES = 8192
_HANG_S = 30
_MEMORY_MB = 2048
# libFuzzer looks at its limits between two inputs; this is for when it does not come back. It
# includes the start, in which every module is instrumented.
_GRACE_S = 2 * GUARD_S


@contextmanager
def ground(folder: Path, _scale: float) -> Iterator[Path]:
    yield folder


def guided(name: str, folder: Path, result: Result, scale: float) -> None:
    """Run libFuzzer on a target up to its first failure, and read what it reports in the end."""
    full, most_s = _RUNS[name]
    corpus = folder / name
    log = folder / f"{name}.log"
    corpus.mkdir()
    command = [sys.executable, "-m", "campaign.fuzzing.libfuzzer", name, str(corpus), *_kept(name)]
    command += [
        f"-runs={scaled(full, scale, _LEAST_RUNS)}",
        f"-max_total_time={most_s}",
        f"-timeout={_HANG_S}",
    ]
    command += [
        f"-rss_limit_mb={_MEMORY_MB}",
        "-seed=1",
        f"-max_len={_MOST_BYTES}",
        "-print_final_stats=1",
    ]
    command += [f"-artifact_prefix={folder}/{name}-"]
    env = os.environ | {"PYTHONPATH": str(FOLDER.parent), "TMPDIR": str(folder)}
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                timeout=most_s + _GRACE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            result.fail("hangs", log.read_text(errors="replace")[-4000:])
            return
    report = log.read_text(errors="replace")
    if counted := re.search(r"stat::number_of_executed_units: (\d+)", report):
        result.injected = int(counted[1])
    broken = re.search(rf"{name}-(crash|timeout|oom)-", report)
    if broken or done.returncode:
        hung = (
            broken and broken[1] == "timeout"
        ) or "\nTimeoutError" in report  # libFuzzer's limit, or a target's own
        kind = "wrong" if "AssertionError" in report else "untyped"
        result.fail("hangs" if hung else kind, report[-4000:])


def _kept(name: str) -> list[str]:
    return [str(FOLDER / kind / name) for kind in ("corpus", "found") if kept(kind, name)]


_NEEDS_ATHERIS = "" if importlib.util.find_spec("atheris") else "atheris is for Linux alone"
ROWS = tuple(
    Row(TARGETS[name].what, partial(guided, name), slow=True, skip=_NEEDS_ATHERIS) for name in _RUNS
)
