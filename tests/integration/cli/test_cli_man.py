"""Man pages of the commands, rendered by groff and found by man."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shardcache.cli.installation.manpages import pages
from shardcache.cli.main import app
from support.programs.cli import clean_environment, shardcache

needs_groff = pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here: apt-get install groff")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages."""
    folder = tmp_path_factory.mktemp("man") / "man1"
    ran = shardcache("man", folder)
    assert ran.code == 0 and str(folder) in ran.out
    return folder


def commands(group: click.Group, path: str = "shardcache") -> Iterator[tuple[str, click.Command]]:
    """Yield a group and the commands below it, with what is typed for each."""
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


ALL = dict(commands(app))


def rendered(page: Path) -> str:
    """Return a page as a terminal shows it, without styles and breaks; fail on anything that groff warns of."""
    command = ("groff", "-man", "-Tutf8", "-ww", "-P-c", "-P-b", "-P-u", "-rLL=1000n", page)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return " ".join(done.stdout.split())


def test_every_command_has_a_page(folder: Path) -> None:
    """Groups and their commands, too, and nothing else."""
    assert {path.name for path in folder.iterdir()} == {f"{name.replace(' ', '-')}.1" for name in ALL}


@needs_groff
@pytest.mark.parametrize("name", ALL)
def test_a_page_has_what_the_help_has(name: str, folder: Path) -> None:
    """Usage, each paragraph, each option with its text, and the exit codes; groff warns of nothing."""
    page, command = rendered(folder / f"{name.replace(' ', '-')}.1"), ALL[name]
    context = click.Context(command, info_name=name)
    assert f"SYNOPSIS {name} {' '.join(command.collect_usage_pieces(context))}" in page
    for param in command.get_params(context):
        for part in param.get_help_record(context) or ():
            assert " ".join(part.split()).replace("`", "") in page
    for text in (command.help or "", command.epilog or ""):
        for paragraph in text.replace("\b", "").split("\n\n"):
            assert " ".join(paragraph.split()).replace("`", "") in page


@needs_groff
def test_nothing_in_a_help_is_a_request_of_roff(tmp_path: Path) -> None:
    """Dots and quotes at the beginning of a line, backslashes and other signs are shown as they are."""
    lines = (".config holds it", "'quoted' first", "C:\\temp", "an ellipsis … and -- dashes")
    help_text = "\n\n".join((*lines, "\b\n" + "\n".join(lines)))
    command = click.Command("odd", help=help_text, params=[click.Option(["--sep"], help="'.' by default")])
    (tmp_path / "odd.1").write_text(pages(click.Group("top", commands=[command]), "top", "1")["top-odd.1"])
    page = rendered(tmp_path / "odd.1")
    assert [page.count(line) for line in lines] == [3, 2, 2, 2]  # the first one is also the summary
    assert "--sep TEXT '.' by default" in page


@pytest.mark.skipif(shutil.which("man") is None, reason="no man here: apt-get install man-db")
@needs_groff
def test_man_finds_and_shows_a_page(folder: Path) -> None:
    """By the command's name with hyphens."""
    env = clean_environment({"MANPATH": str(folder.parent), "MANPAGER": "cat", "MANWIDTH": "100"})
    done = subprocess.run(("man", "shardcache-config-check"), env=env, capture_output=True, text=True, check=True)
    assert "Check a config file" in done.stdout


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    """The error says what to do."""
    (tmp_path / "file").touch()
    ran = shardcache("man", tmp_path / "file" / "man1")
    assert ran.code == 2 and "What to do: " in ran.err
