"""`shardcache install systemd` into the root folder of an image, with systemd's own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.network.other_user import OtherUser, needs_root
from support.programs.cli import Ran, shardcache

ROOT = Path(__file__).parents[3]
PROGRAM = "/opt/elsewhere/bin/shardcache"
UNITS = "etc/systemd/system"
TOOLS = ("systemctl", "systemd-sysusers")

pytestmark = [
    needs_root,
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason="no systemd: apt-get install systemd"),
]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root folder of an image with nothing in it."""
    (tmp_path / "image" / "etc").mkdir(parents=True)
    return tmp_path / "image"


def install(image: Path, *flags: str | Path) -> Ran:
    """Install into an image; it succeeds."""
    ran = shardcache("install", "systemd", "--root", image, "--program", PROGRAM, *flags)
    assert ran.code == 0, ran.err
    return ran


def states(image: Path, *flags: str | Path) -> dict[str, str]:
    """Install, and return what became of each file in the image."""
    steps: list[dict[str, Any]] = install(image, "--json", *flags).json["steps"]
    return {Path(step["what"]).name: step["state"] for step in steps if step["state"] != "ran"}


def ids(image: Path, file: str) -> dict[str, int]:
    """Return the users or groups of an image."""
    lines = (line.split(":") for line in (image / "etc" / file).read_text().splitlines())
    return {fields[0]: int(fields[2]) for fields in lines}


def test_everything_that_the_docs_install_is_there(image: Path) -> None:
    """Users, config, units and link, with owners and modes; systemd counts service and socket as enabled."""
    install(image)
    users, groups = ids(image, "passwd"), ids(image, "group")
    assert users.keys() == {"shardcache"} and {"shardcache", "training"} <= groups.keys()
    config = (image / "etc/shardcache/shardcache.toml").stat()
    assert (config.st_mode & 0o777, config.st_uid, config.st_gid) == (0o640, 0, groups["shardcache"])
    service = (image / UNITS / "shardcache.service").read_text()
    assert f"\nExecStart={PROGRAM} serve\n" in service and "/opt/shardcache" not in service
    assert (image / "usr/local/bin/shardcache").readlink() == Path(PROGRAM)
    for unit in ("shardcache.service", "shardcache.socket"):
        done = subprocess.run(("systemctl", f"--root={image}", "is-enabled", unit), capture_output=True, text=True)
        assert done.stdout == "enabled\n"


def test_the_files_are_those_of_the_docs(image: Path) -> None:
    """But for the program, what is installed is deploy/systemd, under the names that the page gives."""
    install(image)
    page = (ROOT / "docs/deploy-systemd.md").read_text()
    places = re.findall(r"^install -D .*?(shardcache\.\w+) (/\S+)$", page, re.MULTILINE)
    assert len(places) == 2
    for name, place in places:
        assert (image / place[1:]).read_text() == (ROOT / "deploy/systemd" / name).read_text()
    for name in ("shardcache.service", "shardcache.socket"):
        shipped = (ROOT / "deploy/systemd" / name).read_text()
        assert (image / UNITS / name).read_text() == shipped.replace("/opt/shardcache/bin/shardcache", PROGRAM)


def test_a_dry_run_changes_nothing(image: Path) -> None:
    """It prints each file and command."""
    ran = install(image, "--dry-run", "--cache-dir", "/nvme/cache")
    assert [path.name for path in image.rglob("*")] == ["etc"]
    assert f"would create  {image}/{UNITS}/shardcache.service\n" in ran.out
    assert f"would run     systemctl --root={image} enable shardcache.service\n" in ran.out


def test_a_second_run_changes_nothing(image: Path) -> None:
    """Not even times of files."""
    assert set(states(image, "--cache-dir", "/nvme/cache").values()) == {"created"}
    before = {path: path.lstat().st_mtime_ns for path in image.rglob("*") if path.is_file()}
    assert set(states(image, "--cache-dir", "/nvme/cache").values()) == {"unchanged"}
    after = {path: path.lstat().st_mtime_ns for path in image.rglob("*") if path.is_file()}
    named = [path for path in before if "shardcache" in path.name]
    assert len(named) > 3 and {path: before[path] for path in named} == {path: after[path] for path in named}


def test_an_upgrade_replaces_units_and_keeps_the_config(image: Path) -> None:
    """A unit of a former release is updated, a config that the operator wrote and changes by `systemctl edit` stay."""
    states(image)
    (image / UNITS / "shardcache.service").write_text("[Service]\n")
    (image / UNITS / "shardcache.service.d").mkdir()
    (image / UNITS / "shardcache.service.d" / "override.conf").write_text("[Service]\nGroup=ml\n")
    config = image / "etc/shardcache/shardcache.toml"
    config.write_text('capacity = "1TB"\n')
    again = states(image)
    assert (again["shardcache.service"], again["shardcache.toml"]) == ("updated", "kept")
    assert config.read_text() == 'capacity = "1TB"\n'
    assert (image / UNITS / "shardcache.service.d" / "override.conf").exists()
    (image / UNITS / "shardcache.socket").write_text("")
    assert "systemctl restart shardcache.socket shardcache.service" in install(image).out


def test_a_cache_elsewhere_is_the_daemons_and_open_to_the_group(image: Path) -> None:
    """Its folder belongs to both; the unit waits for its disk, may write there, and tells the daemon."""
    install(image, "--cache-dir", "/nvme/cache")
    folder = (image / "nvme/cache").stat()
    assert (folder.st_mode & 0o777, folder.st_uid, folder.st_gid) == (
        0o750,
        ids(image, "passwd")["shardcache"],
        ids(image, "group")["training"],
    )
    settings = (image / UNITS / "shardcache.service.d" / "cache-dir.conf").read_text().splitlines()
    for line in ("RequiresMountsFor", "ReadWritePaths", "Environment=SHARDCACHE_CACHE_DIR"):
        assert f"{line}=/nvme/cache" in settings


def test_a_program_that_the_service_cannot_see_is_refused(image: Path) -> None:
    """A Python in a home folder: the error says where to install instead, and nothing has been done."""
    hidden = ("/home", "/root")
    if not any(Path(sys.executable).resolve().is_relative_to(folder) for folder in hidden):
        pytest.skip("this Python is in no home folder")
    ran = shardcache("install", "systemd", "--root", image)
    assert ran.code == 2 and "/opt/shardcache/bin/pip install" in ran.err
    assert [path.name for path in image.rglob("*")] == ["etc"]


@pytest.mark.parametrize("path", ["/home/alice/cache", "/root/cache", "/nvme/my cache", "/nvme/%h"])
@pytest.mark.parametrize("flag", ["--cache-dir", "--program"])
def test_a_path_that_the_service_cannot_use_is_refused(image: Path, flag: str, path: str) -> None:
    """Home folders are hidden from it, and systemd reads signs in a unit in its own way."""
    ran = shardcache("install", "systemd", "--root", image, "--program", PROGRAM, flag, path)
    assert ran.code == 2 and path in ran.err and [path.name for path in image.rglob("*")] == ["etc"]


def test_a_machine_without_systemd_is_a_usage_error() -> None:
    """With what to do, and nothing changed."""
    if Path("/run/systemd/system").is_dir():
        pytest.skip("systemd runs this machine, which the test leaves alone")
    ran = shardcache("install", "systemd")
    assert ran.code == 2 and "--root DIR" in ran.err and not Path("/etc/shardcache").exists()


def test_only_root_can_install_a_service() -> None:
    """Another user is told the command to type."""
    code, answer = OtherUser(54321).command("install", "systemd")
    assert code == 2 and answer["error"]["code"] == "config" and "sudo " in answer["error"]["remedy"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """With what to do."""
    (tmp_path / "file").touch()
    ran = shardcache("install", "systemd", "--root", tmp_path / "file" / "image", "--program", PROGRAM)
    assert ran.code == 2 and "shardcache.conf: Not a directory" in ran.err and "What to do: " in ran.err


def test_a_command_that_fails_is_an_error_with_its_reason(image: Path) -> None:
    """systemd-sysusers refuses a broken list of users."""
    (image / "etc/group").mkdir()
    ran = shardcache("install", "systemd", "--root", image, "--program", PROGRAM)
    assert ran.code == 1 and f"systemd-sysusers --root={image} failed: " in ran.err
