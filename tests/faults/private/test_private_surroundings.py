"""A private daemon whose reader has another Python, other mounts, or folders of others."""

import asyncio
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache_client.reader import ShardReader
from support.cases import first_quick
from support.disks.mounts import may_mount
from support.programs.cli import shardcache
from support.programs.daemon import PrivateHome, eventually, pid_at
from support.programs.guard import GUARD_S
from support.programs.private_readers import KEYS, READ, SAMPLES, SHARDS, read, start_reader
from support.programs.processes import wait_until_ended
from support.shards.tars import make_tar, write_shards
from support.stores.buckets import Bucket
from support.stores.faulty_s3 import FaultyS3

IS_ROOT = os.geteuid() == 0
WITHOUT_PROC = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc; exec "$@"', "sh")


@pytest.mark.slow
def test_another_python_gets_another_daemon(root: Path, home: PrivateHome) -> None:
    """A daemon depends on the packages of its starter's environment, which may be removed."""
    other = root / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", other], check=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [other / "bin/python", "-c", READ, f"{root}/data/"]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=GUARD_S)
    assert ran.stdout.split() == KEYS, ran.stderr
    shutil.rmtree(other)
    write_shards(root / "data", SHARDS, SAMPLES, {"bin": 30_000})
    assert read(root) == KEYS
    assert len(home.running()) == 2


@pytest.mark.slow
async def test_daemon_whose_socket_a_logout_removed_gives_its_cache_to_the_next(
    home: PrivateHome, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can reach it: it ends once it has no session, long before it would for idleness.

    The next login makes the folder of sockets again; no byte is fetched again.
    """
    for name, value in faulty.env().items():
        monkeypatch.setenv(name, value)
    url = faulty.put("a.tar", make_tar([{"__key__": "a", "txt": b"text"}]))

    def keys() -> list[str]:
        return [sample["__key__"] for sample in ShardReader(url, timeout_s=GUARD_S)]

    def fetched() -> int:
        return sum(method == "GET" for method, *_ in faulty.seen)

    assert await asyncio.to_thread(keys) == ["a"]
    assert fetched() == 1
    (daemon,) = home.pids()
    shutil.rmtree(home.runtime)
    await asyncio.to_thread(wait_until_ended, daemon)
    home.runtime.mkdir(mode=0o700)
    assert await asyncio.to_thread(keys) == ["a"]
    assert fetched() == 1
    assert home.pids() != [daemon]
    assert len([folder for folder in home.caches.iterdir() if folder.is_dir()]) == 1


@pytest.mark.slow
def test_daemon_whose_socket_a_logout_removed_is_found_while_it_is_used(
    root: Path, home: PrivateHome
) -> None:
    """The next login finds it by its cache, and commands find it again at its socket."""
    with start_reader(root, "stop") as job:
        assert job.stdout is not None
        assert job.stdout.readline().strip() == KEYS[0]
        (daemon,) = home.pids()
        shutil.rmtree(home.runtime)
        home.runtime.mkdir(mode=0o700)
        assert read(root) == KEYS
        assert home.pids() == [daemon]
        assert shardcache("status").code == 0
        job.kill()
    assert len([folder for folder in home.caches.iterdir() if folder.is_dir()]) == 1
    home.kill()
    assert read(root) == KEYS, "the link to a daemon that has ended is replaced"
    assert home.pids() != [daemon]


@pytest.mark.slow
def test_jobs_with_runtime_folders_of_their_own_share_a_daemon(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of cron and of a login, or of two containers that have one home."""
    assert read(root) == KEYS
    before = home.pids()
    other = root / "other"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    assert read(root) == KEYS
    assert list(map(pid_at, (other / "shardcache-private").glob("*.sock"))) == before
    assert len([folder for folder in home.caches.iterdir() if folder.is_dir()]) == 1


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")
def test_reader_that_does_not_see_the_cache_gets_another_daemon(
    root: Path, home: PrivateHome
) -> None:
    """Its mount namespace, like a container's, shares the socket's folder, but not the cache."""
    assert read(root) == KEYS
    hide = 'mount -t tmpfs -o mode=700 none "$1" && shift && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", hide, "sh", str(home.caches))
    outputs = [start_reader(root, prefix=prefix).communicate(timeout=GUARD_S) for _ in range(2)]
    assert [out.split() for out, _ in outputs] == 2 * [KEYS], outputs
    assert read(root) == KEYS


@pytest.mark.skipif(not IS_ROOT, reason="needs root, who may become another user")
def test_runtime_folder_of_another_user_is_not_taken_for_a_nodes_daemon(
    root: Path, home: PrivateHome
) -> None:
    """XDG_RUNTIME_DIR outlasts `su bob`, so bob gets a private daemon elsewhere.

    Python is imported before the change of user, who may lack access to the folder that it is
    installed in.
    """
    code = (
        "import os, shardcache.shared.private as p\n"
        "os.setuid(65534); print(p.node_has_daemon(), p.tool_socket())"
    )
    (home.runtime / "shardcache").mkdir(mode=0o700)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S
    )
    assert ran.returncode == 0, ran.stderr
    has_daemon, tool = ran.stdout.split()
    assert has_daemon == "False"
    assert not tool.startswith(str(home.runtime))


@pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")
def test_runtime_folder_too_long_for_a_socket_is_not_used(home: PrivateHome) -> None:
    """A socket's path has at most 107 bytes, so the folder in /tmp takes its place."""
    code = (
        "import hashlib, os, shardcache.shared.private as p, socket, subprocess\n"
        "subprocess.run(['mount', '-t', 'tmpfs', 'none', '/tmp'], check=True)\n"
        "os.environ['XDG_RUNTIME_DIR'] = folder = '/tmp/' + 22 * 'long'\n"
        "os.mkdir(folder, 0o700)\n"
        "place = p.PrivatePlace.find()\n"
        "print(place.folder)\n"
        "socket.socket(socket.AF_UNIX).bind(str(place.socket))"
    )
    command = ["unshare", "--mount", sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True)
    assert ran.stdout.strip() == f"/tmp/shardcache-private-{os.geteuid()}"


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, who may create namespaces")
def test_container_without_init_gets_one(root: Path, home: PrivateHome) -> None:
    """Process 1 of a PID namespace reads without capabilities, and all ends with it."""
    prefix = (
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "setpriv",
        "--inh-caps=-all",
        "--bounding-set=-all",
    )
    out, err = start_reader(root, prefix=prefix).communicate(timeout=GUARD_S)
    assert out.split() == KEYS, err
    eventually(lambda: not home.running())


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, who may create namespaces")
def test_index_file_is_read_where_proc_shows_other_processes(
    root: Path, home: PrivateHome, moto: Bucket
) -> None:
    """A PID namespace may still have the outer /proc, where its process ids are others'."""
    paths = sorted((root / "data").iterdir())
    rows = [{"url": moto.put(path.name, path.read_bytes()), "nsamples": SAMPLES} for path in paths]
    url = moto.put("index.json", json.dumps({"wids_version": 1, "shardlist": rows}).encode())
    reader = start_reader(root, prefix=("unshare", "--pid", "--fork"), urls=url)
    out, err = reader.communicate(timeout=GUARD_S)
    assert out.split() == KEYS, err
    eventually(lambda: not home.running())


@pytest.mark.slow
def test_scheduler_names_the_cache_folder(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is in the job's scratch, for this user alone, and elsewhere once that is gone."""
    scratch = root / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(scratch))
    assert read(root) == KEYS
    (cache,) = scratch.glob(f"shardcache-{os.geteuid()}/*/shards")
    assert not stat.S_IMODE(cache.parent.stat().st_mode) & 0o077
    assert not home.caches.exists()


@pytest.mark.slow
def test_deleted_scratch_folder_is_not_made_again(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends once a scheduler has removed it, and other jobs get one elsewhere."""
    scratch = root / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(scratch))
    assert read(root) == KEYS
    (daemon,) = home.pids()
    scratch.rename(root / "removed")
    monkeypatch.delenv("SLURM_TMPDIR")
    assert read(root) == KEYS
    assert len(list(home.caches.glob("*/shards"))) == 1
    wait_until_ended(daemon)
    assert not scratch.exists()
    (second,) = home.pids()
    assert read(root) == KEYS
    assert home.pids() == [second], "the first one's end does not start a third"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "caches"),
    [("run", "run"), ("run", "run/shardcache-private"), ("run/shardcache-private", "run")],
    ids=["the same", "caches inside", "sockets inside"],
)
def test_folders_of_sockets_and_caches_may_be_one(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch, runtime: str, caches: str
) -> None:
    """Nobody waits for a lock of its own if the variables are equal, and all can be stopped."""
    (root / runtime).mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / runtime))
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / caches))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "first")
    assert read(root) == KEYS
    monkeypatch.setenv("AWS_SESSION_TOKEN", "second")
    assert read(root) == KEYS
    assert len(list((root / caches).glob("shardcache-private/*/shards"))) == 2
    assert len(shardcache("stop", "--json").json["stopped"]) == 2


@pytest.mark.slow
def test_old_caches_beside_the_sockets_are_removed_alone(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket or a log in the common folder may be as old and have a cache folder's name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.runtime))
    folder = home.runtime / "shardcache-private"
    folder.mkdir(mode=0o700)
    logs = [folder / f"{number:016x}.log" for number in range(20)]
    old_caches = [log.with_suffix("") for log in logs]
    for log, cache in zip(logs, old_caches, strict=True):
        log.touch()
        cache.mkdir(mode=0o700)
        os.utime(log, (0, 0))
        os.utime(cache, (0, 0))
    assert read(root) == KEYS
    eventually(lambda: not any(cache.exists() for cache in old_caches))
    assert all(log.exists() for log in logs)


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")
def test_start_without_proc_is_a_typed_error(root: Path, home: PrivateHome) -> None:
    """In a chroot without /proc; the error says what to mount."""
    _, err = start_reader(root, prefix=WITHOUT_PROC).communicate(timeout=GUARD_S)
    assert "CacheDirError: /proc/self/mountinfo" in err
    assert "mount -t proc proc /proc" in err


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")
def test_reader_without_proc_gets_a_typed_error(root: Path, home: PrivateHome) -> None:
    """Its daemon runs, but what its processes share has no path elsewhere."""
    assert shardcache("serve", "--private").code == 0
    code = READ.replace(
        "ShardReader(sys.argv[1], partial_reads=False)", "ShardDataset(sys.argv[1])"
    ).replace("import ShardReader", "import ShardDataset")
    command = [*WITHOUT_PROC, sys.executable, "-c", code, f"{root}/data/"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert "ConfigError: /proc/self/fd" in ran.stderr
    assert "mount -t proc proc /proc" in ran.stderr


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="needs root, who may become less nice")
def test_daemon_has_neither_the_niceness_nor_the_soft_limits_of_its_starter(
    root: Path, home: PrivateHome
) -> None:
    """It serves all of the user's jobs, whatever the first one's batch script has limited."""
    prefix = ("sh", "-c", 'ulimit -S -t 1000; exec nice -n 7 "$@"', "sh")
    out, err = start_reader(root, prefix=prefix).communicate(timeout=GUARD_S)
    assert out.split() == KEYS, err
    (daemon,) = home.pids()
    assert os.getpriority(os.PRIO_PROCESS, daemon) == 0
    soft, hard = resource.prlimit(daemon, resource.RLIMIT_CPU)
    assert soft == hard


@pytest.mark.slow
def test_start_command_whose_messages_are_not_utf_8_starts_the_daemon(
    root: Path, home: PrivateHome
) -> None:
    """The dynamic linker writes a library's path as it is, before Python begins."""
    env = os.environb | {b"LD_PRELOAD": b"/caf\xe9.so"}
    command = [sys.executable, "-c", READ, f"{root}/data/"]
    ran = subprocess.run(command, capture_output=True, env=env, timeout=GUARD_S)
    assert b"/caf\xe9.so" in ran.stderr
    assert ran.stdout.decode().split() == KEYS, ran.stderr


NO_FILES = ("sh", "-c", 'ulimit -S -f 0; exec "$@"', "sh")
NO_FILES_EVER = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh")


@pytest.mark.slow
def test_soft_limit_of_file_sizes_is_that_of_the_starter_alone(
    root: Path, home: PrivateHome
) -> None:
    """A job that may write no files starts a daemon that may, and reads files."""
    assert shardcache("serve", "--private").code == 0, "which makes the key that readers only read"
    home.kill()
    code = "import sys, shardcache_client as c; print(len(c.open_cached(sys.argv[1]).read()))"
    (shard, *_) = sorted((root / "data").iterdir())
    command = [*NO_FILES, sys.executable, "-c", code, shard]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert ran.stdout.split() == [str(shard.stat().st_size)], ran.stderr


@pytest.mark.slow
def test_dataset_where_no_file_may_be_written_is_a_typed_error(
    root: Path, home: PrivateHome
) -> None:
    """Its processes share memory, for which the limit of file sizes counts as well."""
    assert shardcache("serve", "--private").code == 0
    _, err = start_reader(root, prefix=NO_FILES).communicate(timeout=GUARD_S)
    assert "shardcache.errors.ConfigError" in err
    assert "ulimit -S -f unlimited" in err


@pytest.mark.parametrize("starter", first_quick(["command", "reader"]))
def test_hard_limit_of_file_sizes_is_a_typed_error(
    root: Path, home: PrivateHome, starter: str
) -> None:
    """No daemon could cache anything; the remedy is the limit, and no other folder."""
    is_command = starter == "command"
    arguments = (
        ["-m", "shardcache", "serve", "--private"] if is_command else ["-c", READ, f"{root}/data/"]
    )
    command = [*NO_FILES_EVER, sys.executable, *arguments]
    err = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S).stderr
    assert "may write no files" in err
    assert "ulimit -f unlimited" in err
    assert ("Traceback" in err) != is_command
    assert not home.running()
