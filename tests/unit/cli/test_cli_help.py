"""The command line answers at once, and says what it lacks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardcache.cli.main import app
from support.programs.cli import shardcache

HEAVY = ("aiohttp", "pydantic", "rich", "s3fs", "torch", "moto")
COMMANDS = ("serve", "status", "top", "write", "warm", "index", "ls", "evict", "verify", "doctor", "probe", "demo")


def test_help_loads_nothing_heavy() -> None:
    """`shardcache --help` imports none of the packages that take long to import."""
    code = (
        "import sys; from shardcache.cli.main import app; app(['--help'], standalone_mode=False);"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    """Each command has a help page, and the list of commands names it."""
    page = shardcache(command, "--help")
    assert page.code == 0 and page.out.startswith(f"Usage: shardcache {command}")
    assert f"\n  {command} " in shardcache("--help").out


def test_client_installation_says_how_to_get_the_command_line() -> None:
    """Where only the client is installed, the command exits 2 and names the extra."""
    code = "import sys; sys.modules['click'] = None; from shardcache.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'shardcache[daemon]'" in done.stderr


@pytest.mark.parametrize("columns", ["80", "120"])
def test_summaries_are_whole(columns: str) -> None:
    """The list of commands cuts no sentence, in any width."""
    page = " ".join(shardcache("--help", env={"COLUMNS": columns}).out.split())
    assert "..." not in page.partition("Commands:")[2]
    for command in app.commands.values():
        assert " ".join((command.short_help or command.help or "").split()).partition(". ")[0].rstrip(".") in page
