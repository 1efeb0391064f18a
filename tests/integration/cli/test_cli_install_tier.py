"""`shardcache install tier` into the root folder of an image, with systemd's own tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardcache.cli.installation.target import Target
from shardcache.cluster.authority import issue_all
from shardcache.cluster.node_list import parse
from support.network.other_user import needs_root
from support.programs.cli import Ran, shardcache

ROOT = Path(__file__).parents[3]
PROGRAM = "/opt/elsewhere/bin/shardcache"
UNIT = "etc/systemd/system/shardcache-tier.service"
STORE = ("--store", "https://s3.eu-central-1.amazonaws.com", "--resolver", "10.0.0.53")
TOOLS = ("systemctl", "systemd-sysusers")

pytestmark = [
    needs_root,
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason="no systemd: apt-get install systemd"),
]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root folder of an image with nothing but nginx in it."""
    nginx = tmp_path / "image" / "usr" / "sbin" / "nginx"
    nginx.parent.mkdir(parents=True)
    nginx.symlink_to(shutil.which("true") or "")
    (tmp_path / "image" / "etc").mkdir()
    return tmp_path / "image"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site's list of nodes, and the certificates of both."""
    (tmp_path / "nodes").write_text("node1=10.0.0.1\nnode2=10.0.0.2\n")
    issue_all(parse("node1=10.0.0.1,node2=10.0.0.2"), tmp_path / "authority", 30)
    return tmp_path


def attempt(image: Path, *args: str | Path) -> Ran:
    """Run the command on an image."""
    return shardcache("install", "tier", "--root", image, "--program", PROGRAM, *args)


def install(image: Path, site: Path, *args: str | Path) -> Ran:
    """Install this site's first node into an image; it succeeds."""
    files = ("--nodes", site / "nodes", "--certificates", site / "authority" / "node1")
    ran = attempt(image, *files, *STORE, *args)
    assert ran.code == 0, ran.err
    return ran


def states(ran: Ran) -> dict[str, str]:
    """Return what became of each file in the image."""
    steps: list[dict[str, Any]] = ran.json["steps"]
    return {Path(step["what"]).name: step["state"] for step in steps if step["state"] != "ran"}


def origins(image: Path) -> list[dict[str, str]]:
    """Return the tables of the daemon's config."""
    found: list[dict[str, str]] = tomllib.loads((image / "etc/shardcache/shardcache.toml").read_text())["origin"]
    return found


def test_everything_that_the_unit_needs_is_there(image: Path, site: Path) -> None:
    """List, certificates, options, unit and config, with owners and modes; systemd counts the unit as enabled."""
    install(image, site, "--max-size", "2TiB")
    folder = image / "etc/shardcache/tier"
    assert (folder / "nodes").read_text() == (site / "nodes").read_text()
    groups = dict(line.split(":")[0:3:2] for line in (image / "etc/group").read_text().splitlines())
    for name, mode in (("ca.pem", 0o644), ("node.pem", 0o644), ("node.key", 0o640)):
        status = (folder / name).stat()
        assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (mode, 0, int(groups["shardcache"]))
        assert (folder / name).read_bytes() == (site / "authority" / "node1" / name).read_bytes()
    assert f"\nTIER_OPTIONS={' '.join(STORE)} --max-size 2TiB\n" in (folder / "environment").read_text()
    shipped = (ROOT / "deploy/systemd/shardcache-tier.service").read_text()
    assert (image / UNIT).read_text() == shipped.replace("/opt/shardcache/bin/shardcache", PROGRAM)
    assert origins(image) == [{"match": "s3://", "tier": "127.0.0.1:9080"}]
    command = ("systemctl", f"--root={image}", "is-enabled", "shardcache-tier.service")
    assert subprocess.run(command, capture_output=True, text=True).stdout == "enabled\n"


def test_a_second_run_changes_nothing_but_what_is_new(image: Path, site: Path) -> None:
    """The same options leave every file alone, without the site's files too; others are written, and say so."""
    assert set(states(install(image, site, "--json")).values()) == {"created"}
    again = attempt(image, *STORE, "--json")
    assert set(states(again).values()) == {"unchanged"} and again.json["add_to_config"] is None
    changed = attempt(image, *STORE, "--max-size", "1TiB")
    assert "updated       " + str(image / "etc/shardcache/tier/environment") in changed.out
    assert "systemctl restart shardcache-tier.service" in changed.out
    assert shardcache("install", "systemd", "--root", image, "--program", PROGRAM).code == 0
    assert origins(image) == [{"match": "s3://", "tier": "127.0.0.1:9080"}]


def test_folders_can_be_entered_whatever_the_umask(tmp_path: Path) -> None:
    """Root's umask may be strict; the service runs as another user."""
    former = os.umask(0o027)
    try:
        Target(tmp_path, dry_run=False).write(Path("/etc/shardcache/tier/nodes"), "one=127.0.0.2\n")
    finally:
        os.umask(former)
    assert {(tmp_path / folder).stat().st_mode & 0o777 for folder in ("etc/shardcache", "etc/shardcache/tier")} == {
        0o755
    }


def test_a_dry_run_changes_nothing(image: Path, site: Path) -> None:
    """It prints each file and command."""
    before = sorted(image.rglob("*"))
    ran = install(image, site, "--dry-run")
    assert sorted(image.rglob("*")) == before
    assert f"would create  {image}/{UNIT}\n" in ran.out
    assert f"would run     systemctl --root={image} enable shardcache-tier.service\n" in ran.out


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ('capacity = "1TB"\n', '[[origin]]\nmatch = "s3://"\ntier = "127.0.0.1:9080"\n'),
        ('[[origin]]\nmatch = "s3://"\n', '# in the [[origin]] table of s3://: tier = "127.0.0.1:9080"\n'),
        ('[[origin]]\nmatch = "s3://a/"\ntier = "127.0.0.1:9080"\n', None),
    ],
)
def test_a_config_that_was_edited_is_kept(image: Path, site: Path, config: str, added: str | None) -> None:
    """The operator's file stays as it is; the command prints exactly what it lacks."""
    path = image / "etc/shardcache/shardcache.toml"
    path.parent.mkdir()
    path.write_text(config)
    ran = install(image, site, "--json")
    assert path.read_text() == config and states(ran)[path.name] == "kept"
    assert ran.json["add_to_config"] == added
    assert (added or "restart shardcache.service") in install(image, site).out


def test_a_cache_elsewhere_is_the_daemons_alone(image: Path, site: Path) -> None:
    """Its folder is closed to others; the unit waits for its disk, and may write there; the address is the config's."""
    install(image, site, "--cache-dir", "/nvme/tier", "--front", "127.0.0.1:9999")
    folder = (image / "nvme/tier").stat()
    users = dict(line.split(":")[0:3:2] for line in (image / "etc/passwd").read_text().splitlines())
    assert (folder.st_mode & 0o777, folder.st_uid) == (0o700, int(users["shardcache"]))
    settings = (image / f"{UNIT}.d/cache-dir.conf").read_text().splitlines()
    assert "RequiresMountsFor=/nvme/tier" in settings and "ReadWritePaths=/nvme/tier" in settings
    assert origins(image)[0]["tier"] == "127.0.0.1:9999"


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--nodes", "{nodes}", *STORE), "no certificate"),
        ((*STORE,), "cannot read"),
        (("--nodes", "{nodes}", "--certificates", "/nowhere", *STORE), "cannot read"),
        (("--nodes", "{nodes}", "--plain"), "'--store'"),
        (("--nodes", "{nodes}", "--plain", *STORE, "--max-sizes", "2TiB"), "--max-size"),
        (("--nodes", "{nodes}", "--plain", "--store", "s3://bucket"), "s3://bucket"),
        (("--nodes", "{nodes}", "--plain", *STORE, "--cache-dir", "/home/tier"), "home folders"),
        (("--nodes", "{nodes}", "--plain", *STORE, "--store-ca", "/etc/my ca.pem"), "cannot be written into a unit"),
    ],
)
def test_what_could_not_be_used_is_refused(image: Path, site: Path, args: tuple[str, ...], reason: str) -> None:
    """The error says what is wrong, and nothing has been done."""
    before = sorted(image.rglob("*"))
    ran = attempt(image, *(arg.format(nodes=site / "nodes") for arg in args))
    assert ran.code == 2 and reason in ran.err, ran.err
    assert sorted(image.rglob("*")) == before


def test_a_node_without_nginx_is_an_error(image: Path, site: Path) -> None:
    """With what to install."""
    (image / "usr/sbin/nginx").unlink()
    ran = attempt(image, "--nodes", site / "nodes", *STORE)
    assert ran.code == 2 and "apt-get install nginx" in ran.err
