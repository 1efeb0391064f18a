"""Completion as real shells do it with the printed scripts."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.cli import clean_environment, shardcache

SHELLS = ("bash", "zsh", "fish")
LINES = [
    ("sta", {"status"}),
    ("serve --cap", {"--capacity"}),
    ("serve --log-format ", {"text", "json"}),
    ("completion f", {"fish"}),
]


def program(folder: Path) -> dict[str, str]:
    """Put a `shardcache` into a folder; return the environment in which a shell finds it."""
    path = folder / "shardcache"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m shardcache "$@"\n')
    path.chmod(0o755)
    return clean_environment({"PATH": f"{folder}:{os.environ['PATH']}"})


def run(shell: str, code: str, env: dict[str, str], cwd: Path) -> list[str]:
    """Return the lines that code prints in a shell that reads none of the user's files."""
    bare = {"bash": ("--norc", "--noprofile"), "zsh": ("-f",), "fish": ("--no-config",)}[shell]
    done = subprocess.run((shell, *bare, "-c", code), env=env, cwd=cwd, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def completed(shell: str, line: str, folder: Path) -> set[str]:
    """Return what a shell offers at the end of a line."""
    env = program(folder)
    script = folder / "script"
    script.write_text(shardcache("completion", shell).out)
    if shell == "fish":
        offered = run(shell, f"source {script}; complete -C {shlex.quote('shardcache ' + line)}", env, folder)
        return {text.partition("\t")[0] for text in offered}
    words = " ".join(map(shlex.quote, ["shardcache", *line.split(" ")]))
    ask = f"COMP_WORDS=({words}); COMP_CWORD={len(line.split(' '))}; _shardcache_completion shardcache"
    return set(run(shell, f'source {script}; {ask}; printf "%s\\n" "${{COMPREPLY[@]}}"', env, folder))


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell != "zsh"])
@pytest.mark.parametrize(("line", "offered"), LINES)
def test_a_shell_completes_commands_options_and_values(
    shell: str, line: str, offered: set[str], tmp_path: Path
) -> None:
    """A command by its beginning, an option of the daemon, the values of an option and of an argument."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert completed(shell, line, tmp_path) == offered


@pytest.mark.parametrize("line", ["warm sha", "serve --cache-dir sha", "config check sha"])
def test_local_paths_are_completed_by_the_shell(line: str, tmp_path: Path) -> None:
    """For urls, which may be paths, and options that are paths, the shell offers files, as it does without a script."""
    env = program(tmp_path) | {"COMP_WORDS": f"shardcache {line}", "COMP_CWORD": str(len(line.split()))}
    asked = subprocess.run(
        [tmp_path / "shardcache"],
        env=env | {"_SHARDCACHE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout == "file,sha\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_that_the_shell_understands(shell: str, tmp_path: Path) -> None:
    """Each shell's script asks the command in that shell's own way; where the shell is installed, it parses it."""
    printed = shardcache("completion", shell)
    assert printed.code == 0 and f"_SHARDCACHE_COMPLETE={shell}_complete" in printed.out
    if shutil.which(shell):
        (tmp_path / "script").write_text(printed.out)
        subprocess.run((shell, "-n", tmp_path / "script"), check=True)


def test_other_shells_are_a_usage_error() -> None:
    """The error names the shells that there are."""
    ran = shardcache("completion", "tcsh")
    assert ran.code == 2 and all(shell in ran.err for shell in SHELLS)
