"""Pages of the documentation, run as written: scripts, command lines, printed output."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from support import ROOT
from support.programs.examples import is_aborted_by_torch
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar

_FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_PRINT = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    body: str

    @property
    def script(self) -> str:
        """Its name, by its first line, if it is a script; else ""."""
        named = re.match(r"# (\w+\.py)\n", self.body)
        return named[1] if named else ""


def without_blocks(text: str) -> str:
    return _FENCED.sub("", text)


def blocks(text: str, *languages: str) -> Iterator[Block]:
    """Yield the blocks of a text: those in one of `languages`, or all."""
    found = (Block(language, body) for language, body in _FENCED.findall(text))
    return (block for block in found if not languages or block.language in languages)


def recipe(word: str, page: str = "deploy-systemd") -> str:
    """Return the block of a page of docs/, commands or settings, that holds a word."""
    return next(
        block.body
        for block in blocks((ROOT / "docs" / f"{page}.md").read_text())
        if word in block.body
    )


def section(page: str, title: str) -> str:
    return (ROOT / page).read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@dataclass(frozen=True, slots=True)
class Place:
    """A folder and an environment in which pages are run."""

    folder: Path
    env: dict[str, str]

    def write_scripts(self, *pages: str) -> None:
        """Write all scripts of pages."""
        for block in (
            block for page in pages for block in blocks((ROOT / page).read_text()) if block.script
        ):
            (self.folder / block.script).write_text(block.body)

    def write(self, name: str, samples: list[dict[str, bytes | str]]) -> str:
        """Write a shard; return its name."""
        (self.folder / f"{name}.tar").write_bytes(make_tar(samples))
        return f"{name}.tar"

    def run(self, lines: str, more: Mapping[str, str] | None = None, until: str = "") -> str:
        """Run a page's command lines with further variables; return the output. All must succeed.

        With `until`, press Ctrl-C when that much is printed: all processes of the command get the
        signal.
        """
        job = subprocess.Popen(
            ["bash", "-ec", lines],
            cwd=self.folder,
            env={**self.env, **(more or {}), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        printed = ""
        try:
            while len(printed) < len(until) and job.stdout:
                line = job.stdout.readline()
                if not line:
                    break
                printed += line
            if until:
                os.killpg(job.pid, signal.SIGINT)
            rest, complaints = job.communicate(timeout=4 * GUARD_S)  # it may be an installation
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
        is_well = job.returncode == (-signal.SIGINT if until else 0)
        assert is_well or is_aborted_by_torch(complaints), printed + rest + complaints
        return printed + rest

    def follow(self, text: str) -> None:
        """Follow a page from top to bottom; the output must be what its text blocks say.

        A script without command lines after it is run at once; a comment behind a `print` is what
        that prints. A block of text that ends in `^C` is what was printed until the user pressed
        that.
        """
        found = list(blocks(text))
        early = ""
        for block, after in zip_longest(found, found[1:], fillvalue=Block("", "")):
            lines = block.body
            expected = after.body if after.language == "text" else None
            if block.script:
                (self.folder / block.script).write_text(block.body)
                if after.language == "sh":
                    continue
                comments = [line + "\n" for line in _PRINT.findall(block.body)]
                lines = f"python {block.script}"
                expected = expected or "".join(comments)
            elif block.language != "sh":
                continue
            expected, interrupted, _ = (expected or "").partition("^C\n")
            printed = early + self.run(lines, until=expected if interrupted else "")
            # More may be printed before the signal arrives.
            early = printed.removeprefix(expected) if interrupted else ""
            assert not expected or printed == expected + early, f"{lines}\n\n{printed}"
