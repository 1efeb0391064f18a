"""The `shardcache` command as users run it, and what the tests' command lines share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from support.programs.guard import GUARD_S


@dataclass(frozen=True, slots=True)
class Ran:
    """Outcome of a command: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that was printed. Raises ValueError when it is not exactly one."""
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def run_alone(args: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "shardcache", *args)
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=GUARD_S, check=False
    )


usual_run: Callable[[Sequence[str], Mapping[str, str]], subprocess.CompletedProcess[str]] = (
    run_alone
)
"""Runner of commands: the tests replace it by a quicker one."""


def shardcache(
    *args: str | Path, env: Mapping[str, str] | None = None, socket: Path | None = None
) -> Ran:
    """Run the command to its end, with `env` on top of this process's environment."""
    where = () if socket is None else ("--socket", str(socket))
    done = usual_run((*map(str, args), *where), clean_environment(env or {}))
    return Ran(done.returncode, done.stdout, done.stderr)


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the tests' environment, which `conftest.isolate` has cleaned, with `env` on top."""
    return {**os.environ, **env}


def console(*, stderr: bool = False) -> Console:
    found = Console(stderr=stderr)
    # Into a file or a pipe: nothing there has a width that lines must keep to.
    return found if found.is_terminal else Console(stderr=stderr, width=160)


def chosen(only: str, parts: Collection[str]) -> list[str]:
    """Return the parts that `--only` names, with commas between. Raises click.BadParameter."""
    names = [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in parts]
    if unknown:
        raise click.BadParameter(
            f"no part {', '.join(unknown)}; there are {', '.join(parts)}", param_hint="--only"
        )
    return names
