"""Completion as real shells do it with the script that docs/commands.md has them ask for."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.cli import clean_environment, shardcache

BARE = {"bash": ("--norc", "--noprofile"), "fish": ("--no-config",)}
LINES = [
    ("sta", {"status"}),
    ("serve --cap", {"--capacity"}),
    ("serve --log-format ", {"text", "json"}),
    ("config ch", {"check"}),
]


def program(folder: Path) -> dict[str, str]:
    """Put a `shardcache` into a folder; return the environment in which a shell finds it."""
    path = folder / "shardcache"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shardcache "$@"\n')
    path.chmod(0o755)
    return clean_environment({"PATH": f"{folder}:{os.environ['PATH']}"})


def completed(shell: str, line: str, folder: Path) -> set[str]:
    """Return what a shell that reads none of the user's files offers at the end of a line."""
    script = folder / "script"
    script.write_text(shardcache(env={"_SHARDCACHE_COMPLETE": f"{shell}_source"}).out)
    words = " ".join(map(shlex.quote, ["shardcache", *line.split(" ")]))
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line.split(' '))}; _shardcache_completion shardcache"
    code = {
        "bash": f'source {script}; {ask}; printf "%s\\n" "${{COMPREPLY[@]}}"',
        "fish": f"source {script}; complete -C {shlex.quote('shardcache ' + line)}",
    }[shell]
    command = (shell, *BARE[shell], "-c", code)
    done = subprocess.run(command, env=program(folder), cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {text.partition("\t")[0] for text in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", BARE)
@pytest.mark.parametrize(("line", "offered"), LINES)
def test_a_shell_completes_commands_options_and_values(
    shell: str, line: str, offered: set[str], tmp_path: Path
) -> None:
    """A command by its beginning, an option of the daemon, the values of an option, a command of a group."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert completed(shell, line, tmp_path) == offered


@pytest.mark.parametrize("line", ["warm sha", "serve --cache-dir sha", "config check sha"])
def test_local_paths_are_completed_by_the_shell(line: str, tmp_path: Path) -> None:
    """For urls, which may be paths, and options that are paths, the shell offers files, as it does without a script."""
    asked = {
        "COMP_WORDS": f"shardcache {line}",
        "COMP_CWORD": str(len(line.split())),
        "_SHARDCACHE_COMPLETE": "bash_complete",
    }
    assert shardcache(env=asked).out == "file,sha\n"
