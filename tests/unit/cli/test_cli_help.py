"""The command line answers at once, describes its options, and says what it lacks."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from shardcache.cli.doctor.runner import CHECKS
from shardcache.cli.main import app
from shardcache.cli.starting.serve import serve
from shardcache.config.settings import Settings
from support import ROOT

HEAVY = ("aiohttp", "pydantic", "rich", "s3fs", "torch", "moto")


def test_help_loads_nothing_heavy() -> None:
    """`shardcache --help` imports none of the packages that take long to import."""
    code = (
        "import sys; from shardcache.cli.main import app; app(['--help'], standalone_mode=False);"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("columns", [80, 120])
def test_each_command_explains_itself(columns: int) -> None:
    """Each command has a help page and a summary that is not cut in any width."""
    page = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=columns).output.split())
    assert "..." not in page.partition("Commands:")[2]
    for name, command in app.commands.items():
        summary = (
            " ".join((command.short_help or command.help or "").split())
            .partition(". ")[0]
            .rstrip(".")
        )
        assert summary in page
        ran = CliRunner().invoke(app, [name, "--help"], prog_name="shardcache")
        assert ran.exit_code == 0
        assert ran.output.startswith(f"Usage: shardcache {name} ")


def every_command(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the help of a command and of those below it."""
    yield path, command.get_help(click.Context(command, info_name=path))
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, f"{path} {name}")


def test_each_command_has_two_examples() -> None:
    """Lines to copy, at the end of the help of each command and of those below it."""
    examples = {
        path: re.findall(r"^    \S.*$", text.partition("\n  Examples:\n")[2], re.MULTILINE)
        for path, text in every_command(app, "shardcache")
    }
    assert len(examples) > 25
    assert [path for path, lines in examples.items() if len(lines) < 2] == []
    assert {
        line for lines in examples.values() for line in lines if "shardcache " not in line
    } == set()


def values_of_options(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """Yield each option of a command and of those below it, with the word for its value."""
    context = click.Context(command)
    for param in command.get_params(context):
        if isinstance(param, click.Option) and not param.is_flag:
            yield f"{path} {param.opts[0]}", param.make_metavar(context)
    for name, inner in getattr(command, "commands", {}).items():
        yield from values_of_options(inner, f"{path} {name}")


def test_values_of_options_have_names_for_people() -> None:
    """A word, or the choices: not the name of a function of ours that parses it."""
    odd = {option: word for option, word in values_of_options(app, "shardcache") if "_" in word}
    assert odd == {}


@pytest.mark.parametrize(
    ("missing", "program", "code", "remedy"),
    [
        (
            "click",
            "from shardcache.__main__ import main; main()",
            2,
            "pip install 'shardcache[daemon]'",
        ),
        (
            "moto",
            "from shardcache.cli.main import app; app(['demo'])",
            1,
            "pip install 'shardcache[demo]'",
        ),
    ],
)
def test_missing_packages_are_named_with_their_extra(
    missing: str, program: str, code: int, remedy: str
) -> None:
    """The client alone has no command line, and without the extra there is no demo."""
    program = f"import sys; sys.modules[{missing!r}] = None; {program}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert missing in done.stderr
    assert remedy in done.stderr


def test_serve_has_a_flag_for_each_setting() -> None:
    """A Settings field becomes a flag with help by itself; tables stay in the config file."""
    # click keeps the first help option that it makes, and for other tests that was also -h.
    flags = {
        param.opts[0]
        for param in serve.get_params(click.Context(serve))
        if "--help" not in param.opts
    }
    fields = {"--" + name.replace("_", "-") for name in Settings.model_fields if name != "origin"}
    assert flags == {"--config", "--private", "--json", *fields}
    assert all(field.description for field in Settings.model_fields.values())


DOCS = ROOT / "docs" / "doctor.md"
# Findings of checks that have several, after the first; the probe names those of the object stores.
FURTHER = {"disk.read", "origin.credentials", "origin.speed"}


def test_the_docs_list_every_check() -> None:
    """The table in the docs has each check's name, in the order of the report."""
    rows = re.findall(r"^\| (`[a-z]+\.[a-z0-9_]+`.*?) \|", DOCS.read_text(), re.MULTILINE)
    documented = [name for row in rows for name in re.findall(r"`(.*?)`", row)]
    assert [name for name in documented if name not in FURTHER] == list(
        dict.fromkeys(name for name, _ in CHECKS)
    )
    assert set(documented) >= FURTHER


def test_a_list_of_nodes_may_be_longer_than_the_name_of_a_file(tmp_path: Path) -> None:
    """It is taken for a list, and not for a file that cannot be read."""
    nodes = ",".join(f"node{number:02d}=10.0.0.{number}" for number in range(1, 31))
    command = [
        "cluster",
        "render",
        "--nodes",
        nodes,
        "--store",
        "http://10.0.9.9",
        "--out",
        str(tmp_path),
    ]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert len(list(tmp_path.glob("*/nginx.conf"))) == 30
