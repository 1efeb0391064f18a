"""The scripts and commands of the newcomer's pages run as they are written there."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.network.ports import free_port
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S

DOCS = Path(__file__).parents[3] / "docs"
SAMPLES = 4_000

pytestmark = pytest.mark.slow

# What `aws s3 cp s3://… -` does, for the one script that calls it.
AWS = """#!{python}
import os, sys, urllib.request
url = os.environ["AWS_ENDPOINT_URL"] + "/" + sys.argv[3].removeprefix("s3://")
signed = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=any"
asked = urllib.request.Request(url, headers={{"Authorization": signed}})
sys.stdout.buffer.write(urllib.request.urlopen(asked).read())
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with the pages' scripts, a store and a daemon as the first page starts them.

    Attributes:
        folder: where commands are run.
        env: of what reads through the daemon.
        keys: what reads from the store itself has beside that.
    """

    folder: Path
    env: dict[str, str]
    keys: dict[str, str]

    def run(self, line: str, **more: str) -> str:
        """Run a command line of a page, with further variables; return what it printed."""
        words = [self._program(word) for word in shlex.split(line)]
        env = self.env | more
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=GUARD_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @staticmethod
    def _program(word: str) -> str:
        return str(Path(sys.executable).with_name(word.removeprefix("venv/bin/"))) if word.startswith("venv/") else word


def lines(page: str, section: str) -> list[str]:
    """Return the command lines of a section."""
    text = (DOCS / page).read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]


def line_with(words: str, section: str = "Without a bucket") -> str:
    """Return the only line of the first page's section that has these words."""
    (found,) = [line for line in lines("first-steps.md", section) if words in line]
    return found


def write_scripts(folder: Path, port: int) -> None:
    """Write every script of the pages under the name in its first line; the store gets a port that is free."""
    for page in ("first-steps.md", "coming-from.md"):
        for name, body in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            (folder / name).write_text(body.replace("9500", str(port)))
    (folder / "aws").write_text(AWS.format(python=sys.executable))
    (folder / "aws").chmod(0o755)


@contextmanager
def store(place: Place) -> Iterator[None]:
    """Run `store.py` until the end."""
    command = [Place._program(word) for word in line_with("store.py").split()]
    process = subprocess.Popen(command, cwd=place.folder, env=place.env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("s3://first-steps/")
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """Start the servers that the first page names, with its address and keys."""
    with tempfile.TemporaryDirectory(prefix="shardcache-docs-") as root:
        port, folder = free_port(), Path(root)
        write_scripts(folder, port)
        serve = line_with("serve").replace("9500", str(port)).split()
        keys = dict(word.split("=", 1) for word in serve if word.startswith("AWS_"))
        flags = serve[serve.index("serve") + 1 :]
        env = clean_environment({"PATH": f"{root}:{os.environ['PATH']}", "SHARDCACHE_SOCKET": f"{root}/s.sock"})
        here = Place(folder, {name: value for name, value in env.items() if not name.startswith("AWS_")}, keys)
        assert flags[:2] == ["--cache-dir", "./cache"]  # the daemon of tests lies there, too
        with store(here), Daemon(folder, *flags[2:], env=keys):
            yield here


def test_first_steps_without_a_bucket(place: Place) -> None:
    """The newcomer's training loop reads every sample in each epoch, from brace pattern and from index file."""
    printed = place.run(line_with("train.py"))
    assert [int(count) for count in re.findall(r"epoch \d: (\d+) samples", printed)] == 3 * [SAMPLES]
    own = "With a bucket of your own"
    index = line_with("index ", own).replace("YOUR-BUCKET", "first-steps").replace("000099", "000015")
    assert f"{SAMPLES:,} samples" in place.run(index)
    assert printed.count(f": {SAMPLES} samples") == place.run(line_with("train.py", own)).count(f": {SAMPLES} samples")


@pytest.mark.parametrize("loader", ["webdataset", "s3fs"])
def test_scripts_before_and_after_read_the_same(place: Place, loader: str) -> None:
    """Both scripts of a pair read the whole dataset, the one through the daemon without any credentials."""
    assert place.run(f"venv/bin/python before_{loader}.py", **place.keys) == f"{SAMPLES} samples\n"
    assert place.run(f"venv/bin/python after_{loader}.py") == f"{SAMPLES} samples\n"
