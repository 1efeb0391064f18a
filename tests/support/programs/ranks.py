"""Functions of a test's module run as the ranks of a job, under torchrun or as plain processes.

Each rank is a process that calls the function with strings, and returns what json can write.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import TESTS
from support.programs.guard import GUARD_S

Job = Callable[..., Any]


def torchrun(
    job: Job, *arguments: object, ranks: int = 2, options: Sequence[str] = (), **variables: str
) -> list[Any]:
    """Run `job` as the ranks of torchrun, with further options; return each rank's result."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *options,
    ]
    with tempfile.TemporaryDirectory(prefix="shardcache-ranks-") as out:
        _wait([_start(launcher, job, out, arguments, variables)])
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(ranks)]


def processes(job: Job, arguments: Sequence[Sequence[object]], **variables: str) -> list[Any]:
    """Run `job` in a process for each of `arguments`; return each result."""
    with tempfile.TemporaryDirectory(prefix="shardcache-ranks-") as out:
        started = [
            _start([], job, out, each, variables | {"RESULT": f"{rank}.json"})
            for rank, each in enumerate(arguments)
        ]
        _wait(started)
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(len(arguments))]


def _start(
    launcher: list[str], job: Job, out: str, arguments: Sequence[object], variables: dict[str, str]
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        *launcher,
        __file__,
        job.__module__,
        job.__name__,
        out,
        *map(str, arguments),
    ]
    paths = [str(TESTS), str(Path(inspect.getfile(job)).parent), variables.pop("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **variables}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _wait(jobs: list[subprocess.Popen[str]]) -> None:
    try:
        for job in jobs:
            output, _ = job.communicate(timeout=GUARD_S)
            assert job.returncode == 0, output
    finally:
        for job in jobs:
            job.kill()


def main() -> None:
    """Be one rank: call the function, and write down what it returns."""
    module, name, out, *arguments = sys.argv[1:]
    told = getattr(importlib.import_module(module), name)(*arguments)
    result = os.environ.get("RESULT") or f"{os.environ['RANK']}.json"
    Path(out, result).write_text(json.dumps(told))
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        # A thread of the group that frees a tensor while the interpreter ends would abort it
        # (pytorch#190489).
        sys.modules["torch"].distributed.barrier()
        sys.modules["torch"].distributed.destroy_process_group()


if __name__ == "__main__":
    main()
