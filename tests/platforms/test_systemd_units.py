"""The units as systemd's own tools judge them, without running them."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from support import ROOT

DEPLOY = ROOT / "deploy" / "systemd"

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="no systemd-analyze here: apt-get install systemd",
)


DAEMON = ("shardcache.service", "shardcache.socket")
TIER = ("shardcache-tier.service",)


def analyze(command: str, names: Iterable[str], folder: Path) -> str:
    """Check units with systemd-analyze, which finds nothing wrong. Return what it prints."""
    for name in names:
        text = (DEPLOY / name).read_text()
        (folder / name).write_text(
            text.replace("/opt/shardcache/bin/shardcache", shutil.which("true") or "")
        )
    done = subprocess.run(
        ("systemd-analyze", "--no-pager", *command.split(), *names),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("names", [DAEMON, TIER])
def test_systemd_understands_every_line(names: tuple[str, ...], tmp_path: Path) -> None:
    """A misspelt setting is a warning to systemd, and protects nobody."""
    said = analyze("verify --", [f"./{name}" for name in names], tmp_path)
    assert not [line for line in said.splitlines() if "shardcache" in line]


def test_the_exposure_is_what_the_docs_say(tmp_path: Path) -> None:
    """systemd gives the daemon the documented score; the tier is as well locked up."""
    match = re.search(
        r"exposure of \*\*([\d.]+)\*\*", (ROOT / "docs" / "deploy-systemd.md").read_text()
    )
    assert match is not None
    for name, threshold in ((DAEMON[0], round(float(match[1]) * 10)), (TIER[0], 20)):
        said = analyze(f"security --offline=true --threshold={threshold}", [f"./{name}"], tmp_path)
        assert "Overall exposure level" in said
