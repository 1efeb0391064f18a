"""`shardcache doctor` on truly broken nodes and stores: findings name causes and remedies."""

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardcache.cli.doctor import runner
from shardcache.cli.doctor.context import Context, Finding
from shardcache.cli.main import app
from shardcache.store.folder.cache_folder import CacheFolder
from shardcache.store.folder.layout import Layout
from support.disks.mounts import Tmpfs, may_mount
from support.network.other_user import OtherUser, needs_root, open_folder
from support.programs.cli import clean_environment
from support.programs.daemon import Daemon, private_home
from support.programs.guard import GUARD_S
from support.shards.tars import write_shards

needs_mounts = pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")
STRANGER = OtherUser(uid=54_321)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon in a folder that everybody may enter, with a shard in its cache."""
    with open_folder() as folder, Daemon(folder) as daemon:
        [shard] = write_shards(folder, 1, samples_per_shard=200)
        daemon.request("POST", "/v1/warm", {"urls": [f"file://{shard}"]})
        yield daemon


async def look(config: Path | None = None, **flags: str | Path) -> dict[str, Finding]:
    """Return the findings of a quick look, by their names."""
    context = await asyncio.to_thread(
        Context, {name: str(value) for name, value in flags.items()}, config, quick=True
    )
    found = await runner.examine(context)
    return {finding.check: finding for finding in found}


def by_check(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the findings of a report, by their names."""
    return {finding["check"]: finding for finding in report["findings"]}


@pytest.mark.slow
def test_doctor_passes_a_healthy_node(daemon: Daemon) -> None:
    """Exit 0 comes with the daemon's folder and limits, and speeds of disk and store."""
    ran = CliRunner().invoke(app, ["doctor", "--json", "--socket", str(daemon.socket)])
    report = json.loads(ran.stdout)
    found = by_check(report)
    assert ran.exit_code == 0
    assert report["daemon"] is True
    assert report["counts"]["failed"] == 0
    assert str(daemon.pid) in found["socket.daemon"]["found"]
    assert str(daemon.cache_dir) in found["cache.folder"]["found"]
    assert found["disk.write"]["figures"]["bytes_per_s"] > 0
    assert found["disk.read"]["figures"]["bytes_per_s"] > 0
    assert found["origin.speed"]["subject"].startswith(f"file://{daemon.root}/")
    assert found["origin.speed"]["figures"]["read_bytes"] > 0
    assert not [path for path in daemon.cache_dir.iterdir() if path.name.startswith("doctor")]


def test_doctor_without_a_daemon_exits_3(tmp_path: Path) -> None:
    """Exit 3 comes by word as well as by sign, and the last line starts the daemon."""
    flags = ["--cache-dir", f"{tmp_path}/cache", "--socket", f"{tmp_path}/s.sock"]
    ran = CliRunner().invoke(app, ["doctor", "--quick", *flags])
    assert ran.exit_code == 3
    assert "! warning daemon" in ran.stdout
    assert "✓ ok      folder" in ran.stdout
    assert ran.stdout.endswith(f"\ndo first (socket.daemon): shardcache serve {' '.join(flags)}\n")
    assert list(tmp_path.iterdir()) == []


async def test_doctor_fails_a_cache_folder_that_others_can_write_to(tmp_path: Path) -> None:
    """It says what the daemon would say that refuses it, and the command that closes the folder."""
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    found = (await look(cache_dir=cache, socket=tmp_path / "s.sock"))["cache.folder"]
    assert found.state == "failed"
    assert "every user may write to it" in found.cause
    assert found.remedy == f"chmod go-w {cache}"


@needs_root
@pytest.mark.slow
def test_doctor_names_the_group_of_a_closed_socket_and_of_a_closed_folder(daemon: Daemon) -> None:
    """A user outside the group is told which it is, as is a member who may not read files."""
    os.chown(daemon.socket, 0, 45_678)
    os.chown(daemon.cache_dir, 0, 45_679)
    code, report = STRANGER.doctor("--socket", daemon.socket)
    found = by_check(report)["socket.daemon"]
    assert code == 1
    assert found["state"] == "failed"
    assert "root:45678 0660" in found["cause"]
    assert found["remedy"].startswith(f"usermod -aG 45678 {STRANGER.uid}")
    code, report = OtherUser(uid=54_322, groups=(45_678,)).doctor("--socket", daemon.socket)
    found = by_check(report)["cache.folder"]
    assert code == 1
    assert by_check(report)["socket.daemon"]["state"] == "ok"
    assert found["state"] == "failed"
    assert found["remedy"].startswith("usermod -aG 45679 54322")


_CLOSED = 'mount -t tmpfs -o mode=755 tmpfs /run && mkdir -m 0700 /run/shardcache && exec "$@"'


@needs_mounts
@pytest.mark.slow
def test_doctor_names_the_closed_folder_of_the_default_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The closed folder of another user's daemon is named, but left alone with `--socket`."""
    user = OtherUser(STRANGER.uid, within=("unshare", "--mount", "sh", "-c", _CLOSED, "sh"))
    with open_folder() as folder:
        options = ("--cache-dir", folder / "cache")
        folder.chmod(0o777)
        code, report = user.doctor(*options, "--socket", folder / "s.sock")
        assert code == 3, report["findings"]
        assert report["counts"]["failed"] == 0, report["findings"]
        monkeypatch.delenv("SHARDCACHE_SOCKET")
        code, report = user.doctor(*options)
    found = by_check(report)
    assert code == 1
    assert report["socket"] == "/run/shardcache/shardcache.sock"
    assert found["socket.path"]["state"] == "ok"
    assert found["socket.daemon"]["state"] == "failed"
    assert "only its owner may access /run/shardcache" in found["socket.daemon"]["cause"]


@pytest.mark.slow
async def test_doctor_fails_a_daemon_with_few_open_files(daemon: Daemon) -> None:
    """The limit is the running daemon's own, and the command lifts it there."""
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (100, before[1]))
        found = (await look(socket=daemon.socket))["kernel.open_files"]
        assert found.state == "failed"
        assert found.figures == {"limit": 100}
        assert f"prlimit --pid {daemon.pid} --nofile=" in found.remedy
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (300, before[1]))
        assert (await look(socket=daemon.socket))["kernel.open_files"].state == "warning"
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


@needs_root
@pytest.mark.slow
def test_doctor_skips_a_config_that_the_user_may_not_read() -> None:
    """Such a config is not called wrong. A folder without write access gets a remedy."""
    with open_folder() as folder:
        config = folder / "conf.toml"
        config.write_text("")
        config.chmod(0o600)
        _, report = STRANGER.doctor("--config", config, "--socket", folder / "s.sock")
        assert {"config.file": "skipped"}.items() <= {
            f["check"]: f["state"] for f in report["findings"]
        }.items()
        code, report = STRANGER.doctor(
            "--cache-dir", folder / "cache", "--socket", folder / "s.sock"
        )
    found = by_check(report)
    assert code == 1
    assert found["cache.folder"]["state"] == "failed"
    assert found["cache.folder"]["remedy"].startswith(
        f"install -d -o {STRANGER.uid} -m 0750 {folder}/cache"
    )


@needs_mounts
async def test_doctor_tells_small_full_inodeless_and_read_only_disks_apart(tmp_path: Path) -> None:
    """Each is told apart, with what mends it; none of it is written to."""
    cache = tmp_path / "disk" / "cache"
    flags = {"socket": tmp_path / "s.sock"}
    with Tmpfs(tmp_path / "disk", size_bytes=8_000_000, inodes=1000) as disk:
        found = await look(cache_dir=cache, capacity="1GB", **flags)
        assert found["cache.filesystem"].state == "warning"
        assert "memory" in found["cache.filesystem"].cause
        assert found["cache.space"].state == "warning"
        assert "--capacity 7MB" in found["cache.space"].remedy
        disk.fill(leave_bytes=100_000)
        found = await look(cache_dir=cache, **flags)
        assert found["cache.space"].state == "failed"
        assert f"du -xh --max-depth=2 {disk.folder}" in found["cache.space"].remedy
        disk.relieve()
        disk.use_up_inodes()
        found = await look(cache_dir=cache, **flags)
        assert found["cache.space"].state == "failed"
        assert "mkfs" in found["cache.space"].remedy
        disk.relieve()
        assert disk.turn_read_only()
        found = await look(cache_dir=cache, **flags)
        assert found["cache.folder"].remedy == f"mount -o remount,rw {disk.folder}"


async def test_a_check_that_hangs_is_abandoned(tmp_path: Path) -> None:
    """A check that never returns is reported, and the report does not wait for its thread."""
    hangs = threading.Event()

    def never(_context: Context) -> None:
        hangs.wait()

    context = Context({"socket": str(tmp_path / "s.sock")}, None)
    [found] = await runner.examine(context, [("disk.hung", never)], limit_s=0.01)
    assert found.state == "failed"
    assert "hangs" in found.cause
    assert found.check == "doctor.disk"
    hangs.set()


_BREAK = """
set -e
mount -t tmpfs -o size=64m tmpfs /dev/shm
mkdir "$1/lower" "$1/layers" "$1/container"
mount -t tmpfs tmpfs "$1/layers"
mkdir "$1/layers/upper" "$1/layers/work"
layers="lowerdir=$1/lower,upperdir=$1/layers/upper,workdir=$1/layers/work"
mount -t overlay -o "$layers" overlay "$1/container"
exec "$2" -m shardcache doctor --quick --json --cache-dir "$1/container/cache" --socket "$1/s.sock"
"""


@pytest.mark.slow
@needs_mounts
def test_doctor_warns_of_a_container_with_little_of_everything(tmp_path: Path) -> None:
    """A mount namespace shows warnings of shared memory and of the container's own layer."""
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", _BREAK, "bash", tmp_path, sys.executable],
        env=clean_environment({}),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    found = by_check(json.loads(done.stdout))
    for check, remedy in {
        "kernel.shared_memory": "--shm-size=8g",
        "cache.filesystem": "-v /nvme/shardcache:",
    }.items():
        assert found[check]["state"] == "warning", found[check]
        assert remedy in found[check]["remedy"], found[check]


@pytest.mark.parametrize(
    ("name", "text", "check", "state", "says"),
    [
        (
            "conf.toml",
            'socket = "{}/s.sock"\n',
            "socket.path",
            "warning",
            ["export SHARDCACHE_SOCKET={}/s.sock"],
        ),
        ("conf.toml", 'capacity = "a lot"\n', "config.file", "failed", ["capacity"]),
    ],
)
async def test_doctor_names_what_the_daemon_or_its_clients_would_fail_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    check: str,
    state: str,
    says: list[str],
) -> None:
    """A socket where clients do not look, and a wrong value: each with its remedy."""
    monkeypatch.delenv("SHARDCACHE_SOCKET")
    (tmp_path / name).write_text(text.format(tmp_path))
    flags = (
        {} if "socket" in text else {"socket": tmp_path / "s.sock", "cache_dir": tmp_path / "cache"}
    )
    found = await look(tmp_path / "conf.toml", **flags)
    assert found[check].state == state
    assert all(each.format(tmp_path) in json.dumps(asdict(found[check])) for each in says), found[
        check
    ]


async def test_doctor_fails_a_folder_of_sockets_that_clients_refuse() -> None:
    """Its error is the finding, even if the config file names another socket."""
    with tempfile.TemporaryDirectory() as root, private_home(Path(root)) as home:
        config = home.root / "conf.toml"
        config.write_text(f'socket = "{root}/s.sock"\n')
        folder = home.runtime / "shardcache-private"
        folder.mkdir(mode=0o755)
        found = (await look(config))["socket.path"]
    assert found.state == "failed"
    assert found.found.startswith(f"other users have access to {folder}")
    assert found.remedy == f"chmod 700 {folder}"


async def test_doctor_names_a_socket_left_by_a_killed_daemon(tmp_path: Path) -> None:
    """It is told apart from one that was never there."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s.sock"))
    found = (await look(socket=tmp_path / "s.sock"))["socket.daemon"]
    assert found.state == "warning"
    assert "killed" in found.cause
    assert "shardcache serve" in found.remedy


@needs_root
async def test_doctor_warns_of_a_folder_of_another_user(tmp_path: Path) -> None:
    """Files of two users in one cache end in a daemon that may not remove its own."""
    CacheFolder.take(Layout(tmp_path / "a cache"), None).close()
    os.chown(tmp_path / "a cache" / "partial", STRANGER.uid, -1)
    found = (await look(cache_dir=tmp_path / "a cache", socket=tmp_path / "s.sock"))["cache.folder"]
    assert found.state == "warning"
    assert f"{tmp_path}/a cache/partial belongs to {STRANGER.uid}" in found.cause
    assert f"chown -R root '{tmp_path}/a cache'" in found.remedy


# Stores that are well, down, forbidden, late, or asked in the wrong way


def test_the_first_step_advised_has_no_value_that_was_warned_of(tmp_path: Path) -> None:
    """The command that starts a daemon has the capacity that fits the disk, wherever shown."""
    flags = [
        "--cache-dir",
        f"{tmp_path}/cache",
        "--capacity",
        "1000TB",
        "--socket",
        f"{tmp_path}/s.sock",
    ]
    ran = CliRunner().invoke(app, ["doctor", "--quick", *flags])
    assert ran.exit_code == 3
    assert "capacity 1,000.0 TB" in ran.stdout or "capacity 1.0 PB" in ran.stdout
    assert "--capacity 1000TB" not in ran.stdout
    folders = rf"--cache-dir {tmp_path}/cache --capacity \d+[GM]B --socket {tmp_path}/s.sock"
    start = f"shardcache serve {folders}"
    assert re.search(rf"^do first \(socket\.daemon\): {start}$", ran.stdout, re.MULTILINE)
    assert re.search(rf"^ +fix +{start}   # or a larger disk$", ran.stdout, re.MULTILINE)


@needs_mounts
async def test_folder_in_memory_is_not_in_the_command_that_starts_a_daemon(tmp_path: Path) -> None:
    """Nor is a capacity that was computed for it."""
    with Tmpfs(tmp_path / "memory", 10**8) as memory:
        found = await look(
            cache_dir=memory.folder / "cache", capacity="500GB", socket=tmp_path / "s.sock"
        )
    assert found["cache.filesystem"].state == "warning"
    for check in ("socket.daemon", "cache.filesystem"):
        assert "--cache-dir /path/on/local/disk --capacity 500GB" in found[check].remedy
