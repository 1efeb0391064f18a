"""Running libFuzzer as a program, and reading what it says in the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fuzz.targets import FOLDER, kept

MOST_BYTES = 8192
HANG_S = 30
MEMORY_MB = 2048
# libFuzzer looks at its limits between two inputs; this is for when it does not come back.
_GRACE_S = 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one run.

    Attributes:
        runs: inputs that were really given.
        kind: `crash`, `timeout` or `oom` where it ended early, else empty.
        story: the end of what it said then, the input in base64 in it.
    """

    runs: int
    kind: str
    story: str

    @property
    def broke_promise(self) -> bool:
        """True if a check failed, rather than something else being raised."""
        return self.kind == "crash" and "AssertionError" in self.story


def fuzz(name: str, runs: int, most_s: int, folder: Path) -> Outcome:
    """Give a target so many inputs, or as many as there is time for; stop at the first that breaks it."""
    corpus = folder / name
    corpus.mkdir()
    command = [sys.executable, "-m", "fuzz", name, str(corpus), *_kept(name), f"-runs={runs}"]
    command += [f"-max_total_time={most_s}", f"-timeout={HANG_S}", f"-rss_limit_mb={MEMORY_MB}", "-seed=1"]
    command += [f"-max_len={MOST_BYTES}", f"-artifact_prefix={folder}/{name}-", "-print_final_stats=1"]
    env = os.environ | {"PYTHONPATH": str(FOLDER.parent), "TMPDIR": str(folder)}
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        try:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, timeout=most_s + _GRACE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(0, "timeout", log.read_text(errors="replace")[-4000:])
    said = log.read_text(errors="replace")
    counted = re.search(r"stat::number_of_executed_units: (\d+)", said)
    broken = re.search(rf"{name}-(crash|timeout|oom)-", said)
    kind = broken[1] if broken else "" if done.returncode == 0 else "crash"
    if kind == "crash" and "\nTimeoutError" in said:  # a target's own limit
        kind = "timeout"
    return Outcome(int(counted[1]) if counted else 0, kind, said[-4000:] if kind else "")


def _kept(name: str) -> list[str]:
    return [str(FOLDER / kind / name) for kind in ("corpus", "found") if kept(kind, name)]
