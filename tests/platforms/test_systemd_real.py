"""The units under systemd itself, which starts, watches and replaces the daemon."""

import json
import socket
import urllib.request
from collections.abc import Iterator

import pytest

from support.platforms.nspawn import Machine, installed, why_not
from support.programs.daemon import eventually
from support.programs.pages import recipe
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import MotoS3

UNIT = "shardcache.service"
SOCKET = "/run/shardcache/shardcache.sock"
REASON = why_not()
# A manager that is busy, and a node that is: what is waited for comes in seconds.
LIMIT_S = 120.0

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.timeout(1200),
    pytest.mark.platform,
]


@pytest.fixture(scope="module")
def machine(moto_server: MotoS3) -> Iterator[Machine]:
    """A machine with the service installed as documented and two users; alice trains."""
    with installed(moto_server.env()) as booted:
        for user in ("alice", "bob"):
            booted.run("useradd", user)
        booted.run("sh", "-ec", recipe("usermod"))
        yield booted


@pytest.fixture(scope="module")
def url(moto_server: MotoS3) -> str:
    moto_server.make_bucket("systemd")
    return moto_server.put("systemd", "a.tar", make_tar(random_samples(20)))


def asked(machine: Machine, *args: str, user: str = "alice") -> list[dict[str, object]]:
    """Run a command of shardcache's as a user; return what it printed."""
    printed = machine.run("shardcache", *args, "--json", user=user)
    return [json.loads(line) for line in printed.splitlines()]


def cached(machine: Machine) -> str:
    """Return the path of the only shard in the cache."""
    return machine.run("find", "/var/cache/shardcache/shards", "-name", "*.tar").strip()


def test_only_training_ranks_are_served(machine: Machine, url: str) -> None:
    """The sandboxed daemon works, and its files and its socket are the group's alone."""
    assert asked(machine, "warm", url)[-1]["event"] == "done"
    tar = cached(machine)
    for path in (tar, SOCKET):
        assert machine.run("stat", "--format=%U:%G", path) == "shardcache:training\n"
    machine.run("md5sum", tar, user="alice")
    machine.run("md5sum", tar, user="bob", fails=True)
    assert "Permission denied" in machine.run(
        "cat", "/etc/shardcache/environment", user="shardcache", fails=True
    )
    assert "may not use" in machine.run("shardcache", "status", user="bob", fails=True)
    eventually(lambda: "1 shards" in machine.property(UNIT, "StatusText"), limit_s=LIMIT_S)
    [evicted] = asked(machine, "evict", url)
    assert evicted["evicted"] == [url]


def test_worker_process_starts_on_demand(machine: Machine, url: str) -> None:
    """The socket and the cache outlast a stop, and the next request starts the daemon."""
    asked(machine, "warm", url)
    tar = cached(machine)
    machine.run("systemctl", "stop", UNIT)
    assert machine.state(UNIT) == "inactive"
    assert machine.state("shardcache.socket") == "active"
    [shard] = asked(machine, "ls")
    assert shard["url"] == url
    assert machine.state(UNIT) == "active"
    assert machine.run("stat", "--format=%U:%G", tar) == "shardcache:training\n"


def test_a_daemon_that_hangs_is_replaced(machine: Machine, url: str) -> None:
    """The watchdog ends the daemon, the journal says where it hung, and clients wait."""
    hasty = f"/run/systemd/system/{UNIT}.d/hasty.conf"
    machine.write(hasty, "[Service]\nWatchdogSec=5\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", UNIT)
    before = machine.property(UNIT, "MainPID")
    machine.run("kill", "-STOP", before)
    eventually(lambda: machine.property(UNIT, "MainPID") not in (before, "0"), limit_s=LIMIT_S)
    assert asked(machine, "status")[0]["pid"] != int(before)
    journal = machine.run("journalctl", "--no-pager", f"--unit={UNIT}")
    assert "Watchdog timeout" in journal
    assert "Fatal Python error: Aborted" in journal
    machine.run("rm", hasty)
    machine.run("systemctl", "daemon-reload")


def test_a_config_that_makes_no_sense_is_not_tried_again(machine: Machine) -> None:
    """It fails once, says why, and serves again when the config is mended."""
    machine.run("cp", "/etc/shardcache/shardcache.toml", "/run/good.toml")
    machine.write("/etc/shardcache/shardcache.toml", 'capactiy = "1GB"')
    machine.run("systemctl", "restart", UNIT, fails=True)
    assert machine.state(UNIT) == "failed"
    assert machine.property(UNIT, "ExecMainStatus") == "2"
    assert "capactiy" in machine.run("journalctl", "--no-pager", f"--unit={UNIT}")
    machine.run("cp", "/run/good.toml", "/etc/shardcache/shardcache.toml")
    machine.run("systemctl", "start", UNIT)
    assert asked(machine, "status")[0]["version"]


def change(machine: Machine, unit: str, name: str, settings: str) -> None:
    machine.write(f"/etc/systemd/system/{unit}.d/{name}.conf", settings)
    machine.run("systemctl", "daemon-reload")


def test_the_cache_may_go_to_another_group(machine: Machine, url: str) -> None:
    """Shards cached already are not fetched again, as the docs say, and the former group is out."""
    asked(machine, "warm", url)
    machine.run("groupadd", "ml")
    machine.run("usermod", "--append", "--groups", "ml", "bob")
    change(machine, UNIT, "group", recipe("\nGroup=ml"))
    change(machine, "shardcache.socket", "group", recipe("SocketGroup=ml"))
    machine.run("systemctl", "restart", "shardcache.socket", UNIT)
    assert asked(machine, "ls", user="bob")[0]["url"] == url
    machine.run("md5sum", cached(machine), user="bob")
    assert "may not use" in machine.run("shardcache", "status", user="alice", fails=True)
    machine.run(
        "rm",
        f"/etc/systemd/system/{UNIT}.d/group.conf",
        "/etc/systemd/system/shardcache.socket.d/group.conf",
    )


def test_a_disk_credentials_and_a_port_as_the_docs_say(
    machine: Machine, url: str, moto_server: MotoS3
) -> None:
    """Shards are on the other disk, requests are signed by the profile, and TCP is answered."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    machine.write("/etc/shardcache/environment", f"AWS_ENDPOINT_URL={moto_server.endpoint_url}")
    secrets = (
        "[default]\naws_access_key_id = test\naws_secret_access_key = test\nregion = us-east-1\n"
    )
    machine.write("/etc/shardcache/aws-credentials", secrets)
    machine.run(
        "install", "-d", "-o", "shardcache", "-g", "training", "-m", "750", "/nvme/shardcache"
    )
    machine.run(
        "sh", "-c", """echo 'cache_dir = "/nvme/shardcache"' >> /etc/shardcache/shardcache.toml"""
    )
    change(machine, UNIT, "disk", recipe("ReadWritePaths"))
    change(machine, UNIT, "credentials", recipe("LoadCredential"))
    change(machine, "shardcache.socket", "port", recipe("ListenStream").replace("9300", str(port)))
    machine.run("systemctl", "stop", UNIT)
    machine.run("systemctl", "restart", "shardcache.socket")
    assert asked(machine, "warm", url)[-1]["event"] == "done"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status") as answer:
        cache = json.load(answer)["cache"]
    assert cache["dir"] == "/nvme/shardcache"
    assert cache["shards"] == 1
