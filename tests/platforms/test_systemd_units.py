"""The units as systemd's own tools judge them, without running them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "systemd"

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here: apt-get install systemd"
)


@pytest.fixture
def units(tmp_path: Path) -> tuple[Path, Path]:
    """The service, with a program that is there, and the socket."""
    service = (DEPLOY / "shardcache.service").read_text()
    (tmp_path / "shardcache.service").write_text(
        service.replace("/opt/shardcache/bin/shardcache", shutil.which("true") or "")
    )
    shutil.copy(DEPLOY / "shardcache.socket", tmp_path)
    return tmp_path / "shardcache.service", tmp_path / "shardcache.socket"


def analyze(*args: str | Path) -> str:
    """Run systemd-analyze, which finds nothing wrong; return all it prints."""
    command = ("systemd-analyze", "--no-pager", *map(str, args))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_systemd_understands_every_line(units: tuple[Path, Path]) -> None:
    """A misspelt setting is a warning to systemd, and protects nobody."""
    said = analyze("verify", *units)
    assert not [line for line in said.splitlines() if "shardcache" in line]


def test_the_exposure_is_what_the_docs_say(units: tuple[Path, Path]) -> None:
    """The score in the docs is the one that systemd gives, or worse."""
    match = re.search(r"exposure \*\*([\d.]+)\*\*", (ROOT / "docs" / "deploy-systemd.md").read_text())
    assert match is not None
    threshold = round(float(match[1]) * 10)
    said = analyze("security", "--offline=true", f"--threshold={threshold}", units[0])
    assert "Overall exposure level" in said


def test_systemd_understands_the_tiers_unit(tmp_path: Path) -> None:
    """The unit of the cluster's cache has no misspelt setting either, and is as well locked up."""
    unit = tmp_path / "shardcache-tier.service"
    text = (DEPLOY / unit.name).read_text()
    unit.write_text(text.replace("/opt/shardcache/bin/shardcache", shutil.which("true") or ""))
    assert not [line for line in analyze("verify", unit).splitlines() if "shardcache" in line]
    assert "Overall exposure level" in analyze("security", "--offline=true", "--threshold=20", unit)
