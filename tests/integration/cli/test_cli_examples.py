"""The command line is as its pages say: examples run, and documented exit codes occur."""

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shardcache.cli.main import app
from support import ROOT
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually, spawn
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

DOCS = ROOT / "docs"
# Commands that last, or need other nodes or a private daemon, and those that need what others
# before them have made.
APART = {"serve", "dashboard", "demo", "cluster run", "cluster status", "stop"}
ORDER = ("write", "index", "doctor", "warm", "get", "ls", "verify", "pin", "unpin", "evict")


def examples(command: click.Command = app, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the path of a command, and of each below it, with the examples on its help page."""
    page = command.get_help(click.Context(command)).partition("Examples:")[2]
    yield path, re.findall(r"^ +shardcache (.*)$", page, re.MULTILINE)
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from examples(inner, f"{path} {name}".strip())


def test_each_help_page_has_two_examples() -> None:
    """Those of a group are of its commands."""
    for path, found in examples():
        assert len(found) == 2, path
        assert all(example.startswith(path) for example in found), path


@pytest.mark.slow
def test_examples_run(moto: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store, a daemon and files of the names in them."""
    monkeypatch.chdir(tmp_path)
    Path("photos/cat").mkdir(parents=True)
    Path("photos/cat/0.jpg").write_bytes(os.urandom(100))
    Path("lines.jsonl").write_text('{"id": 1}\n' * 10)
    Path("shardcache.toml").write_text('part_size = "8MiB"\n')
    Path("nodes.txt").write_text("node1=10.0.0.1,node2=10.0.0.2\n")
    moto.put("val/shard-000000.tar", make_tar(random_samples(5)))
    moto.put("llama/model.safetensors", os.urandom(1_000))
    pages = {
        path: found for path, found in examples() if path not in APART | {"", "cluster", "config"}
    }
    # The doctor looks at its environment.
    with Daemon(tmp_path, "--s3", "127.0.0.1:0", spawn=spawn) as daemon:
        monkeypatch.setenv("SHARDCACHE_SOCKET", str(daemon.socket))
        for path in (*ORDER, *pages.keys() - {*ORDER}):
            for example in pages[path]:
                ran = shardcache(
                    *shlex.split(
                        example.replace("s3://bucket", moto.url).replace("/nvme", str(tmp_path))
                    )
                )
                assert ran.code == 0, (example, ran.out, ran.err)


CODES = {
    0: ("probe live", "config show", "doctor --quick"),
    1: (
        "evict s3://no/",
        "warm /none.tar",
        "get /none/ .",
        "write none .",
        "doctor --quick /none.tar",
    ),
    2: (
        "warm",
        "serve --capacity lots",
        "config check no",
        "index a.tar -o a.txt",
        "nonsense",
        "doctor --nonsense",
    ),
    3: (
        "status --socket no",
        "stop --socket no",
        "probe live --socket no",
        "doctor --quick --socket no",
    ),
}


@pytest.mark.slow
def test_exit_codes_are_those_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all commands, and of the doctor; Ctrl-C ends with 130."""
    monkeypatch.chdir(tmp_path)
    with Daemon(tmp_path) as daemon:
        monkeypatch.setenv("SHARDCACHE_SOCKET", str(daemon.socket))
        found = {
            line: shardcache(*shlex.split(line)).code for lines in CODES.values() for line in lines
        }
        watching = spawn(("top", "--json"), os.environ, tmp_path / "top.log")
        eventually((tmp_path / "top.log").read_text)
        os.kill(watching.pid, signal.SIGINT)
        assert watching.wait(GUARD_S) == 130
    assert found == {line: code for code, lines in CODES.items() for line in lines}
    for page, codes in (("commands", {*CODES, 130}), ("doctor", {*CODES})):
        table = (DOCS / f"{page}.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
        assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
