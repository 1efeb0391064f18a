"""The command line answers at once, describes all of its options and checks, and says what it lacks."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from shardcache.cli.doctor.runner import CHECKS
from shardcache.cli.main import app
from shardcache.cli.serve import serve
from shardcache.config import Settings
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


FLAGS = [name for name in Settings.model_fields if name != "origin"]


def flag(name: str) -> str:
    """Return the option of a field."""
    return "--" + name.replace("_", "-")


def test_serve_has_a_flag_for_each_setting() -> None:
    """A field of Settings needs no second declaration to become a flag; tables stay in the config file."""
    # click keeps the first help option that it makes, and for other tests that was also -h.
    flags = {param.opts[0] for param in serve.get_params(click.Context(serve)) if "--help" not in param.opts}
    assert flags == {"--config", "--private", "--json", *map(flag, FLAGS)}


def test_every_setting_is_described() -> None:
    """Help and the settings page have something to say about each option."""
    assert all(field.description for field in Settings.model_fields.values())


DOCS = Path(__file__).parents[3] / "docs" / "doctor.md"
# Findings of checks that have several, after the first; the probe names those of the object stores.
FURTHER = {"disk.read", "origin.credentials", "origin.speed"}


def test_the_docs_list_every_check() -> None:
    """The table in the docs has each check's name, in the order of the report."""
    rows = re.findall(r"^\| (`[a-z]+\.[a-z_]+`.*?) \|", DOCS.read_text(), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    assert [name for name in documented if name not in FURTHER] == list(dict.fromkeys(name for name, _ in CHECKS))
    assert set(documented) >= FURTHER
