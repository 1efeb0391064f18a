"""A user's private daemon: started by the first reader, shared, and safe from others."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.errors import ConfigError, DaemonError, NoDaemonError
from shardcache.shared.private import locked
from shardcache_client.files.paths import cached_paths
from shardcache_client.reader import ShardReader
from support.disks.mounts import may_mount
from support.programs.cli import shardcache
from support.programs.daemon import PrivateHome, UnixConnection, eventually
from support.programs.guard import GUARD_S
from support.programs.private_readers import KEYS, READ, SAMPLES, SHARDS, read, start_reader

NOBODY = 65534
IS_ROOT = os.geteuid() == 0


@pytest.mark.slow
def test_processes_that_start_at_once_share_one_daemon(root: Path, home: PrivateHome) -> None:
    """Each of six processes reads everything. One has started the daemon, and tells of it."""
    readers = [start_reader(root) for _ in range(6)]
    outputs = [reader.communicate(timeout=GUARD_S) for reader in readers]
    assert [out.split() for out, _ in outputs] == 6 * [KEYS]
    (line,) = [line for _, err in outputs for line in err.splitlines() if "daemon" in line]
    assert str(home.caches) in line
    assert "shardcache stop" in line
    assert "shardcache serve --cache-dir" in line
    assert len(home.running()) == 1


@pytest.mark.slow
def test_daemon_survives_the_job_that_started_it(root: Path, home: PrivateHome) -> None:
    """The next job finds the same daemon and cache after kill -9 of the process group."""
    reader = start_reader(root, "stop", start_new_session=True)
    assert reader.stdout is not None
    assert reader.stdout.readline().strip() == KEYS[0]
    (daemon,) = home.pids()
    os.killpg(reader.pid, signal.SIGKILL)
    reader.communicate()
    assert read(root) == KEYS
    assert home.pids() == [daemon]


@pytest.mark.slow
def test_killed_daemon_is_started_again_in_the_middle_of_an_epoch(
    root: Path, home: PrivateHome
) -> None:
    """No sample is lost or repeated, and the next daemon finds the cache of the one before."""
    samples = iter(ShardReader(f"{root}/data/", timeout_s=GUARD_S))
    keys = [next(samples)["__key__"] for _ in range(SAMPLES + 1)]
    before = home.pids()
    os.kill(before[0], signal.SIGKILL)
    keys += [sample["__key__"] for sample in samples]
    assert keys == KEYS
    assert len(home.pids()) == 1
    assert home.pids() != before
    assert len([folder for folder in home.caches.iterdir() if folder.is_dir()]) == 1


KILL = """
import os, signal, sys
from pathlib import Path
while True:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes().split(b"\\0")
        except OSError:
            continue
        home = f"XDG_RUNTIME_DIR={sys.argv[1]}".encode()
        if home in environ and b"\\0serve\\0--private\\0" in command:
            os.kill(int(process.name), signal.SIGKILL)
            print(process.name, flush=True)
            if sys.stdin.readline() != "again\\n":
                sys.exit()
"""


@pytest.mark.slow
def test_readers_survive_a_kill_of_the_daemon_while_it_starts(
    root: Path, home: PrivateHome
) -> None:
    """No reader fails, though the command or its daemon is killed three times at the start."""
    command = [sys.executable, "-c", KILL, str(home.runtime)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killer:
        assert killer.stdin is not None
        assert killer.stdout is not None
        readers = [start_reader(root) for _ in range(3)]
        for word in ("again", "again", "end"):
            assert killer.stdout.readline()
            killer.stdin.write(f"{word}\n")
            killer.stdin.flush()
        outputs = [reader.communicate(timeout=GUARD_S) for reader in readers]
    assert [out.split() for out, _ in outputs] == 3 * [KEYS], outputs


@pytest.mark.slow
def test_other_credentials_get_another_daemon(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither socket nor cache folder is shared, and no name or log of theirs shows any."""
    assert read(root) == KEYS
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
    assert read(root) == KEYS
    assert len(home.running()) == 2
    assert len([folder for folder in home.caches.iterdir() if folder.is_dir()]) == 2
    files = [path for folder in (home.runtime, home.caches) for path in folder.rglob("*")]
    assert not [path for path in files if path.is_file() and b"wJalrXUtnFEMI" in path.read_bytes()]
    assert all(
        not stat.S_IMODE(path.stat().st_mode) & 0o007
        for path in (home.runtime / "shardcache-private").iterdir()
    )


@pytest.mark.slow
def test_variables_that_grant_no_access_do_not_divide_daemons(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs, ranks and temporary folders may differ: `shardcache status` finds the daemon."""
    assert read(root) == KEYS
    for name, value in {
        "RANK": "3",
        "SLURM_JOB_ID": "17",
        "TMPDIR": str(root),
        "SHARDCACHE_JOB": "b",
    }.items():
        monkeypatch.setenv(name, value)
    assert read(root) == KEYS
    assert len(home.running()) == 1
    status = shardcache("status", "--json").json
    assert status["pid"] == home.pids()[0]
    assert status["cache"]["shards"] == SHARDS
    other = {"AWS_PROFILE": "other"}
    assert shardcache("status", env=other).code == 0, "looking takes no credentials"
    assert shardcache("warm", f"{root}/data/", env=other).code == 3, (
        "fetching with another's is refused"
    )
    assert shardcache("warm", f"{root}/data/").code == 0


@pytest.mark.slow
def test_idle_daemon_ends_and_stays_while_it_is_used(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after its last session, leaves only cache and log, and is started if needed."""
    monkeypatch.setenv("SHARDCACHE_IDLE_EXIT_S", "1")  # long enough for a slow reader to connect
    samples = iter(ShardReader(f"{root}/data/", timeout_s=GUARD_S, epochs=1))
    next(samples)
    (socket,) = home.running()
    log = socket.with_suffix(".log")
    with pytest.raises(TimeoutError):
        eventually(lambda: not home.running(), limit_s=2.0)
    assert [sample["__key__"] for sample in samples] == KEYS[1:]
    del samples
    eventually(lambda: not socket.exists())
    eventually(lambda: "stopped" in log.read_text())
    monkeypatch.delenv("SHARDCACHE_IDLE_EXIT_S")
    assert read(root) == KEYS


@pytest.mark.slow
def test_stop_ends_private_daemons(root: Path, home: PrivateHome) -> None:
    """`shardcache stop` waits for their end. Without any, it exits as for a missing daemon."""
    assert shardcache("stop").code == 3
    assert shardcache("serve", "--private").code == 0
    again = shardcache("serve", "--private", "--json")
    assert again.json == {"socket": str(home.running()[0]), "started": False}
    stopped = shardcache("stop", "--json")
    assert stopped.json["stopped"] == [again.json["socket"]]
    assert not home.running()


def test_stop_goes_on_after_a_daemon_that_cannot_be_stopped(root: Path, home: PrivateHome) -> None:
    """The other daemon is stopped and in the result, after which the first's error comes."""
    assert shardcache("serve", "--private").code == 0
    (path,) = home.running()
    full = path.with_name("0.sock")  # the first of the folder
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(full))
        listener.listen(0)
        first.connect(str(full))
        ran = shardcache("stop", "--json")
    assert ran.code == 3, ran.err
    result, failure = ran.events
    assert result == {"stopped": [str(path)]}
    assert failure["error"]["url"] == str(full)
    assert "accepts no connections" in ran.err
    assert not home.running()


@pytest.mark.slow
def test_stop_says_that_readers_will_start_another(root: Path, home: PrivateHome) -> None:
    """As they do: a private daemon is not stopped for good while somebody reads from it."""
    reader = start_reader(root, "stop")
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline().strip() == KEYS[0]
        stopped = shardcache("stop")
        assert "1 reader attached; it will start another" in stopped.err
        assert stopped.out.startswith("stopped: ")
    finally:
        reader.kill()
        reader.communicate()


@pytest.mark.slow
def test_stop_names_the_process_of_a_frozen_daemon(root: Path, home: PrivateHome) -> None:
    """A daemon that does not answer cannot be asked to stop, so the remedy is a command."""
    assert shardcache("serve", "--private").code == 0
    (pid,) = home.pids()
    os.kill(pid, signal.SIGSTOP)
    stopped = shardcache("stop")
    assert stopped.code == 3
    assert f"kill -9 {pid}" in stopped.err


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: folder.symlink_to(folder.parent), "is a link or belongs to another user"),
        (lambda folder: folder.mkdir(mode=0o755), "chmod 700"),
        pytest.param(
            lambda folder: (folder.mkdir(mode=0o700), os.chown(folder, NOBODY, NOBODY)),
            "is a link or belongs to another user",
            marks=pytest.mark.skipif(not IS_ROOT, reason="needs root, who may give files away"),
        ),
    ],
)
def test_folder_that_could_be_anothers_is_refused(
    root: Path, home: PrivateHome, spoil: object, why: str
) -> None:
    """No socket is used or made behind a link, in a shared folder, or in another user's."""
    folder = home.runtime / "shardcache-private"
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(DaemonError) as refused:
        read(root)
    assert why in str(refused.value)
    assert not list(home.runtime.glob("*.sock"))
    assert not list(folder.glob("*.sock"))


# Listens at a path as another user, and accepts every connection without a word.
IMPOSTOR = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
os.chdir(sys.argv[1])
listener.bind(sys.argv[2])
os.setuid(65534)
listener.listen()
print(1, flush=True)
held = []
while True:
    held.append(listener.accept())
"""


@pytest.mark.slow
@pytest.mark.skipif(not IS_ROOT, reason="needs root, who may become another user")
def test_daemon_of_another_user_is_not_used(root: Path, home: PrivateHome) -> None:
    """A process of another user that listens at this user's socket is not talked to."""
    assert read(root) == KEYS
    (path,) = home.running()
    home.kill()
    path.unlink(missing_ok=True)
    posing = subprocess.Popen(
        [sys.executable, "-c", IMPOSTOR, str(path.parent), path.name], stdout=subprocess.PIPE
    )
    try:
        assert posing.stdout is not None
        assert posing.stdout.readline()
        with pytest.raises(DaemonError):
            read(root)
    finally:
        posing.kill()
        posing.communicate()


@pytest.mark.slow
def test_daemon_that_cannot_be_reached_keeps_its_folder(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second daemon, which finds neither of the first's sockets, takes another folder."""
    assert read(root) == KEYS
    (socket,) = home.caches.glob("*/*.sock")
    socket.unlink()
    other = root / "other"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    assert read(root) == KEYS
    names = sorted(folder.name for folder in home.caches.iterdir() if folder.is_dir())
    assert names == [names[0], f"{names[0]}.1"]
    assert shardcache("stop").code == 0


# Starts the daemon in a thread, forks processes meanwhile that live until their input ends, and
# prints "started".
FORK = """
import os, threading
from shardcache_client.daemon import private_start
start, is_starting = private_start._start, threading.Event()
private_start._start = lambda: (is_starting.set(), start())
thread = threading.Thread(target=private_start.ensure_started)
thread.start()
is_starting.wait()
for _ in range(20):
    if os.fork() == 0:
        os.close(1)
        os._exit(len(os.read(0, 1)))
thread.join()
print("started", flush=True)
os.read(0, 1)
"""


@pytest.mark.slow
def test_workers_forked_during_the_start_hold_up_neither_it_nor_the_next(
    root: Path, home: PrivateHome
) -> None:
    """Workers that another thread forks outlive the daemon, and its successor still starts."""
    job = subprocess.Popen(
        [sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdin is not None
    try:
        assert job.stdout.readline() == "started\n"
        home.kill()
        with locked(home.runtime / "shardcache-private" / "turn.lock", limit_s=GUARD_S):
            pass
        assert read(root) == KEYS
    finally:
        job.communicate()


@pytest.mark.slow
def test_caches_of_old_credentials_are_removed(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day after their last use; a cache that is in use, or was lately, stays."""
    folders = []
    for token in ("old", "lately"):
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        assert read(root) == KEYS
        home.kill()
        folders += [path for path in home.caches.iterdir() if path.is_dir() and path not in folders]
    old, lately = folders
    for path in (old, old / "partial"):
        os.utime(path, (0, 0))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "new")
    assert read(root) == KEYS
    eventually(lambda: not old.exists())
    assert lately.exists()


NETWORK = "30 22 0:40 / / rw,relatime shared:1 - nfs4 server:/export rw,vers=4.2\n"


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")
def test_relative_folder_of_the_cache_is_that_of_the_starter(
    root: Path, home: PrivateHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon changes to the root folder, but its cache stays where it was checked."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert read(root) == KEYS
    assert len(list(home.caches.glob("*/shards"))) == 1


def test_cache_on_a_network_filesystem_is_refused(root: Path, home: PrivateHome) -> None:
    """The error has the line to type, for a mount table in which the disk is a server's."""
    (root / "mounts").write_text(NETWORK)
    see = 'mount --bind "$1/mounts" /proc/$$/mountinfo && shift && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", see, "sh", str(root), sys.executable)
    ran = subprocess.run(
        [*command, "-m", "shardcache", "serve", "--private"], capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert "network filesystem (nfs4" in ran.stderr
    assert "export SHARDCACHE_CACHE_DIR=" in ran.stderr
    assert not home.running()


def test_node_with_a_daemon_that_is_down_gets_no_private_one(root: Path, home: PrivateHome) -> None:
    """The error stays if somebody set up a daemon, or if the argument says so."""
    os.utime(root, (0, 0))  # a folder that has just changed is that of a daemon that restarts
    with pytest.raises(NoDaemonError):
        ShardReader(f"{root}/data/", daemon="node", socket=root / "s.sock")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NoDaemonError):
        patch.setenv("SHARDCACHE_SOCKET", str(root / "s.sock"))
        ShardReader(f"{root}/data/")
    with (
        pytest.raises(ConfigError, match="socket"),
        cached_paths(f"{root}/data/", daemon="private", socket=root / "s.sock"),
    ):
        pass
    assert not home.running()


@pytest.mark.slow
def test_cached_paths_and_indexed_samples_come_through_it(root: Path, home: PrivateHome) -> None:
    """All that open a session find it, also if asked for on a node that has a daemon."""
    with cached_paths(f"{root}/data/") as paths:
        assert all(Path(path).is_relative_to(home.caches) for path in paths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCACHE_SOCKET", str(root / "s.sock"))
        samples = ShardReader(f"{root}/data/", daemon="private").indexed()
    assert [samples[number]["__key__"] for number in range(len(samples))] == KEYS
    connection = UnixConnection(home.running()[0])
    connection.request("GET", "/v1/health")
    assert connection.getresponse().status == 200
    connection.close()


WITHOUT_AIOHTTP = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "aiohttp" else found(name)
"""


@pytest.mark.slow
def test_training_environment_without_the_daemons_packages_says_what_to_install(
    root: Path, home: PrivateHome
) -> None:
    """At construction, before anything else."""
    command = [sys.executable, "-c", WITHOUT_AIOHTTP + READ, f"{root}/data/"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert "ConfigError" in ran.stderr
    assert "pip install 'shardcache[daemon]'" in ran.stderr
    assert not home.running()


def test_get_starts_a_private_daemon(root: Path, home: PrivateHome) -> None:
    """As every reader does where nobody set one up; the next command finds it."""
    for state in ("copied", "present"):
        ran = shardcache("get", f"{root}/data/", root / "out", "--copy", "--json")
        assert ran.code == 0, ran.err
        assert f'"{state}": {SHARDS}' in ran.out
    assert len(list((root / "out").iterdir())) == SHARDS
