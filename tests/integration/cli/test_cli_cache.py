"""`warm`, `ls`, `evict`, `verify` and `status` against a real daemon."""

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from shardcache.cli.admin_client import AdminClient
from support.cases import first_quick
from support.programs.cli import Ran, clean_environment, shardcache
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples, write_shards
from support.stores.canary import GatedStore

SHARDS = 3


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Return the urls of a few shards in a store."""
    folder = tmp_path / "store"
    folder.mkdir()
    return [f"file://{path}" for path in write_shards(folder, SHARDS, samples_per_shard=10)]


@pytest.fixture
def prefix(shards: list[str], tmp_path: Path) -> str:
    """Return the prefix that those shards share and no other test's."""
    return f"file://{tmp_path}/store/"


@pytest.fixture
def pattern(prefix: str) -> str:
    """Return the brace pattern of those shards."""
    return f"{prefix}shard-{{000000..{SHARDS - 1:06d}}}.tar"


@pytest.fixture
def warmed(daemon: Daemon, shards: list[str]) -> Daemon:
    """Have the daemon fetch those shards."""
    assert shardcache("warm", *shards, socket=daemon.socket).code == 0
    return daemon


def cached(daemon: Daemon, prefix: str) -> list[str]:
    """Return the urls that the daemon has below a prefix, sorted."""
    urls = [row["url"] for row in daemon.shards()]
    return sorted(url for url in urls if url.startswith(prefix))


def done(ran: Ran) -> dict[str, object]:
    """Return the last event."""
    return ran.events[-1]


def test_warm_reports_each_shard_and_the_sum(
    daemon: Daemon, pattern: str, shards: list[str], tmp_path: Path
) -> None:
    """Output of --json has each shard as it arrives, and the sum. Cached ones are not fetched."""
    ran = shardcache("warm", "--json", pattern, socket=daemon.socket)
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert ran.code == 0
    assert ran.events[0] == {"event": "resolved", "shards": SHARDS, "total_bytes": None}, (
        "braces give no sizes"
    )
    arrived = {event["url"]: event["state"] for event in ran.events if event["event"] == "shard"}
    assert arrived == dict.fromkeys(shards, "fetched")
    numbers = {
        "shards": SHARDS,
        "fetched": SHARDS,
        "cached": 0,
        "failed": 0,
        "origin_bytes": size_bytes,
    }
    assert done(ran) == {"event": "done"} | numbers
    again = done(shardcache("warm", "--json", pattern, socket=daemon.socket))
    assert again["cached"] == SHARDS
    assert again["fetched"] == 0
    assert again["origin_bytes"] == 0


@pytest.mark.slow
def test_each_warm_has_an_order_of_its_own(pattern: str, shards: list[str], tmp_path: Path) -> None:
    """All nodes of a cluster warm the same shards, and would each want the same one at a time."""
    (tmp_path / "node").mkdir()
    with Daemon(tmp_path / "node", "--max-transfers", "1") as node:
        rans = [shardcache("warm", "--json", pattern, socket=node.socket) for _ in range(8)]
    orders = [[event["url"] for event in ran.events if event["event"] == "shard"] for ran in rans]
    assert len(set(map(tuple, orders))) > 1
    assert all(sorted(order) == shards for order in orders)


def test_shards_that_fail_are_named_and_the_others_arrive(
    daemon: Daemon, shards: list[str], tmp_path: Path
) -> None:
    """Exit 1 names a missing shard and one that is no tar. Text has each remedy once."""
    (tmp_path / "no.tar").write_bytes(b"this is no tar" * 1000)
    missing = shards[0].replace("000000", "99999{8,9}")
    no_tar = f"file://{tmp_path}/no.tar"
    ran = shardcache("warm", "--json", missing, no_tar, *shards, socket=daemon.socket)
    errors = [event["error"] for event in ran.events if event["event"] == "error"]
    expected = [(missing.replace("{8,9}", digit), "not_found") for digit in "89"] + [
        (no_tar, "not_a_tar")
    ]
    assert ran.code == 1
    assert sorted((error["url"], error["code"]) for error in errors) == sorted(expected)
    assert done(ran)["fetched"] == SHARDS
    assert done(ran)["failed"] == 3
    assert cached(daemon, f"file://{tmp_path}/") == shards
    ran = shardcache("warm", missing, socket=daemon.socket)
    assert ran.code == 1
    assert ran.out.count("failed  ") == 2
    assert ran.out.count("What to do: check the path") == 1


def test_ctrl_c_ends_the_waiting_with_130(tmp_path: Path) -> None:
    """A warm whose store never answers ends at once and quietly on Ctrl-C, as shells expect."""
    with socket.create_server(("127.0.0.1", 0)) as store, Daemon(tmp_path) as fresh:
        url = f"http://127.0.0.1:{store.getsockname()[1]}/shard.tar"
        command = [sys.executable, "-m", "shardcache", "warm", url, "--socket", str(fresh.socket)]
        with subprocess.Popen(
            command, env=clean_environment({}), stderr=subprocess.PIPE, text=True
        ) as process:
            # The daemon asks the store, and the command waits for the answer.
            connection, _ = store.accept()
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
            assert process.stderr is not None
            assert process.stderr.read() == ""
        connection.close()


def test_ls_lists_what_is_cached(warmed: Daemon, shards: list[str], prefix: str) -> None:
    """JSON has a line a shard, text only urls that start with PREFIX, whole even in a pipe."""
    ran = shardcache("ls", "--json", prefix, socket=warmed.socket)
    assert ran.code == 0
    assert sorted(row["url"] for row in ran.events) == shards
    assert [(row["samples"], row["leases"]) for row in ran.events] == [(10, 0)] * SHARDS
    ran = shardcache("ls", shards[1], socket=warmed.socket, env={"COLUMNS": "20"})
    assert ran.code == 0
    assert ran.out.splitlines()[1].split()[0] == shards[1]
    assert len(ran.out.splitlines()) == 2


@pytest.mark.parametrize("prefix", first_quick(["s3://nothing/", "nothing", "/nothing/"]))
def test_ls_says_that_nothing_is_cached_there(warmed: Daemon, prefix: str) -> None:
    """In place of an empty table; as JSON, there is no line."""
    ran = shardcache("ls", prefix, socket=warmed.socket)
    assert ran.code == 0
    assert ran.out == f"no cached shard has a url that starts with {prefix}\n"
    assert shardcache("ls", "--json", prefix, socket=warmed.socket).out == ""


@pytest.mark.parametrize("command", first_quick(["ls", "verify", "evict", "unpin"]))
def test_urls_of_an_unknown_protocol_are_an_error(warmed: Daemon, command: str) -> None:
    """Of commands that ask for cached shards, too: there cannot be any."""
    ran = shardcache(command, "s4://", socket=warmed.socket)
    assert ran.code == 2
    assert ran.out == ""
    assert "there is no filesystem for s4:// urls; did you mean 's3'?" in ran.err


@pytest.mark.slow
@pytest.mark.parametrize("command", first_quick(["ls", "verify"]))
def test_prefix_may_be_a_path(
    warmed: Daemon, shards: list[str], tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is absolute or relative, and a folder whose name only begins alike is another."""
    (tmp_path / "store-2").mkdir()
    monkeypatch.chdir(tmp_path)
    absolute = (f"{tmp_path}/store", f"{tmp_path}/store/shard-", f"file:{tmp_path}/store/")
    for path in (*absolute, "./store", "store", "store/", "store/shard-"):
        found = shardcache(command, "--json", path, socket=warmed.socket).events
        assert sorted({event["url"] for event in found if "url" in event}) == shards


@pytest.mark.slow
@pytest.mark.parametrize("prefix", first_quick(["file://", "FILE:///", "file", "/"]))
def test_all_local_files_have_one_prefix(
    warmed: Daemon, tmp_path: Path, shards: list[str], prefix: str
) -> None:
    """A reader may name them by path or by url; the prefix may also end within the scheme."""
    folder = tmp_path / "by-path"
    folder.mkdir()
    write_shards(folder, 1, 2)
    assert shardcache("warm", f"{folder}/", socket=warmed.socket).code == 0
    found = {row["url"] for row in shardcache("ls", "--json", prefix, socket=warmed.socket).events}
    assert found >= {*shards, f"{folder}/shard-000000.tar"}


@pytest.mark.slow
@pytest.mark.parametrize("read_as", ["", "file://"], ids=["read by path", "read by url"])
@pytest.mark.parametrize("named_as", ["", "file://"], ids=["named by path", "named by url"])
def test_path_and_url_of_a_file_are_the_same(
    warmed: Daemon, tmp_path: Path, read_as: str, named_as: str
) -> None:
    """Whichever of them a reader has used, and whichever a command is given."""
    folder = tmp_path / "other"
    folder.mkdir()
    write_shards(folder, 1, 2)
    assert shardcache("warm", f"{read_as}{folder}/", socket=warmed.socket).code == 0
    for command in ("ls", "verify"):
        found = shardcache(command, "--json", f"{named_as}{folder}/", socket=warmed.socket).events
        assert [event["url"] for event in found if "url" in event] == [
            f"{read_as}{folder}/shard-000000.tar"
        ]
    assert shardcache("evict", f"{named_as}{folder}/", socket=warmed.socket).code == 0


@pytest.mark.slow
def test_ls_into_a_closed_pipe_is_quiet(warmed: Daemon) -> None:
    """`shardcache ls | head` shows no traceback when head has seen enough."""
    for flags in ([], ["--json"]):
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "shardcache", "ls", *flags, "--socket", str(warmed.socket)]
        ran = subprocess.run(
            command,
            env=clean_environment({}),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        os.close(writing)
        assert ran.stderr == ""


def test_evict_removes_what_matches(
    warmed: Daemon, shards: list[str], prefix: str, tmp_path: Path
) -> None:
    """A brace pattern removes its shards from the cache alone. No match gives exit 1."""
    ran = shardcache("evict", "s3://other/{0..3}.tar", socket=warmed.socket)
    assert ran.code == 1
    assert "no cached shard matches" in ran.out
    assert cached(warmed, prefix) == shards
    ran = shardcache(
        "evict", "--json", shards[0].replace("000000", "{000000,000002}"), socket=warmed.socket
    )
    assert ran.code == 0
    assert sorted(ran.json["evicted"]) == [shards[0], shards[2]]
    assert ran.json["kept"] == []
    assert cached(warmed, prefix) == [shards[1]]
    assert len(list((tmp_path / "store").iterdir())) == SHARDS


@pytest.mark.parametrize(("pattern", "count"), [("*.tar", 1), ("**/*.tar", 2)])
def test_globs_mean_the_same_to_every_command(
    daemon: Daemon, tmp_path: Path, pattern: str, count: int
) -> None:
    """`pin`, `unpin`, `warm` and `evict` match alike: only `**` crosses folders, not `*`."""
    (tmp_path / "sub").mkdir()
    for path in ("a.tar", "sub/b.tar"):
        (tmp_path / path).write_bytes(make_tar(random_samples(2)))
    glob = f"file://{tmp_path}/{pattern}"
    assert done(shardcache("pin", "--json", glob, socket=daemon.socket))["shards"] == count
    pinned = cached(daemon, f"file://{tmp_path}/")
    assert len(pinned) == count
    assert shardcache("warm", f"file://{tmp_path}/**", socket=daemon.socket).code == 0
    unpinned = sorted(shardcache("unpin", "--json", glob, socket=daemon.socket).json["unpinned"])
    assert unpinned == pinned
    evicted = sorted(shardcache("evict", "--json", glob, socket=daemon.socket).json["evicted"])
    assert evicted == pinned
    assert len(cached(daemon, f"file://{tmp_path}/")) == 2 - count


def test_relative_paths_mean_the_callers_folder(
    daemon: Daemon, shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`warm` and `evict` take a glob below the working folder, not the daemon's."""
    monkeypatch.chdir(tmp_path)
    warmed = done(shardcache("warm", "--json", "store/*.tar", socket=daemon.socket))
    assert warmed["shards"] == SHARDS
    evicted = shardcache("evict", "--json", "./store/*.tar", socket=daemon.socket).json["evicted"]
    assert sorted(f"file://{path}" for path in evicted) == shards


def test_verify_finds_a_flipped_bit_and_the_next_fetch_heals_it(
    warmed: Daemon, shards: list[str], prefix: str
) -> None:
    """Exit 1 names the shard, which is put aside and comes fresh from the store."""
    damaged = flip_a_bit(warmed, shards[1])
    ran = shardcache("verify", "--json", prefix, socket=warmed.socket)
    wrong = [event["url"] for event in ran.events if event["event"] == "shard" and not event["ok"]]
    assert ran.code == 1
    assert wrong == [shards[1]]
    assert done(ran)["corrupt"] == 1
    assert not damaged.exists()
    assert (warmed.cache_dir / "quarantine" / damaged.name).exists()
    assert cached(warmed, prefix) == [shards[0], shards[2]]
    assert done(shardcache("warm", "--json", *shards, socket=warmed.socket))["fetched"] == 1
    assert shardcache("verify", prefix, socket=warmed.socket).code == 0
    flip_a_bit(warmed, shards[0])
    ran = shardcache("verify", prefix, socket=warmed.socket)
    assert ran.code == 1
    assert f"failed  {shards[0]}: " in ran.out
    assert "What to do:" in ran.out
    assert f"{SHARDS} shards verified" in ran.out
    assert "1 corrupt" in ran.out


def flip_a_bit(daemon: Daemon, url: str) -> Path:
    """Damage a published shard within a sample's bytes; return its path."""
    [sidecar] = (
        path
        for path in daemon.cache_dir.glob("shards/*/*.idx")
        if url.encode() in path.read_bytes()
    )
    path = sidecar.with_suffix(".tar")
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("command", first_quick(["status", "warm", "ls"]))
def test_a_request_to_the_daemon_loads_little(
    command: str, warmed: Daemon, shards: list[str]
) -> None:
    """The daemon's packages would take longer to import than the daemon takes to answer."""
    urls = shards if command == "warm" else []
    where = ("--json", "--socket", str(warmed.socket))
    run = [sys.executable, "-X", "importtime", "-m", "shardcache", command, *urls, *where]
    done = subprocess.run(
        run, env=clean_environment({}), capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "shardcache.cli.admin_client" in loaded
    assert not loaded & {"aiohttp", "asyncio", "pydantic", "rich", "shardcache.shared.tarindex"}


@pytest.mark.slow
def test_every_command_ends_while_the_daemon_hangs(tmp_path: Path, shards: list[str]) -> None:
    """A stopped daemon is given up by its silence, and the error says how to end its pid."""
    commands = [
        ["status"],
        ["ls"],
        ["pin"],
        ["stop"],
        ["verify"],
        ["warm", *shards],
        ["pin", *shards],
        ["unpin", *shards],
        ["evict", *shards],
        ["index", "-o", f"{tmp_path}/index.json", *shards],
    ]
    with Daemon(tmp_path) as frozen, ThreadPoolExecutor(len(commands)) as threads:
        frozen.pause()
        outcomes = list(
            threads.map(lambda command: shardcache(*command, socket=frozen.socket), commands)
        )
        for command, ran in zip(commands, outcomes, strict=True):
            assert ran.code == 3, command
            assert "does not answer within 10 s" in ran.err, command
            assert f"kill -9 {frozen.pid}" in ran.err, command


@pytest.mark.slow
def test_warm_waits_as_long_as_the_daemon_is_alive(daemon: Daemon) -> None:
    """However long the store is silent, a daemon that answers for its health is not given up."""
    silence_s = 2.0  # a daemon under load takes a while to answer
    with GatedStore() as store:
        client = AdminClient(daemon.socket, silence_s)
        with closing(client.warm([store.put("late.tar", make_tar(random_samples(3)))])) as events:
            threading.Timer(2.5 * silence_s, store.let, ["late.tar"]).start()
            assert list(events)[-1]["event"] == "done"
