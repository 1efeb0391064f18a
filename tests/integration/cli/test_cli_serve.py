"""Start, refusal to start, and end of `shardcache serve`."""

import json
import os
import pty
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.cases import first_quick
from support.network.other_user import needs_root
from support.programs.cli import Ran, clean_environment, shardcache
from support.programs.daemon import Daemon, Process, eventually, spawn
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession


def refused(folder: Path, *args: str | Path, config: str = "") -> Ran:
    """Run `serve`, which is expected to end by itself; with a config file of the given text."""
    (folder / "shardcache.toml").write_text(config)
    return shardcache(
        "serve", "--config", folder / "shardcache.toml", "--socket", folder / "s.sock", *args
    )


def test_cache_dir_below_a_file_is_refused(tmp_path: Path) -> None:
    """A cache folder that cannot be made is an error that names it, and no socket stays behind."""
    (tmp_path / "file").touch()
    ran = refused(tmp_path, "--cache-dir", tmp_path / "file" / "cache")
    assert ran.code == 1
    assert str(tmp_path / "file" / "cache") in ran.err
    assert "What to do:" in ran.err
    assert "Traceback" not in ran.err
    assert not (tmp_path / "s.sock").exists()


@needs_root
@pytest.mark.parametrize("name", first_quick(["catalogue", "partial", "shards/00", "pins"]))
def test_link_that_another_user_planted_in_the_cache_folder_is_refused(
    name: str, tmp_path: Path
) -> None:
    """It would be followed: the error names it, and its target keeps its mode and stays empty."""
    target = tmp_path / "target"
    target.mkdir(mode=0o755)
    link = tmp_path / "cache" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    os.lchown(link, 65534, 65534)
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", "--capacity", "1GB")
    assert ran.code == 1
    assert f"{link} is a link of another user" in ran.err
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", first_quick([".", "partial", "shards/00", "catalogue"]))
def test_cache_folder_that_every_user_can_write_to_is_refused(name: str, tmp_path: Path) -> None:
    """The error names the folder, be it the cache's or one within, and nothing is written."""
    folder = tmp_path / "cache" / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", "--capacity", "1GB")
    assert ran.code == 1
    assert f"every user can write to {folder}," in ran.err
    assert f"chmod go-w {folder}" in ran.err
    assert not (tmp_path / "cache" / "format").exists()


@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "who"),
    [
        (0, 100, 0o770, "group users"),
        (65534, 0, 0o755, "user nobody, its owner,"),
        (0, 54321, 0o770, "group 54321"),
    ],
)
def test_cache_folder_that_other_users_can_write_to_is_refused(
    uid: int, gid: int, mode: int, who: str, tmp_path: Path
) -> None:
    """A group's members and another owner are named."""
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, uid, gid)
    folder.chmod(mode)
    ran = refused(tmp_path, "--cache-dir", folder, "--capacity", "1GB")
    assert ran.code == 1
    assert f"{who} can write to {folder}," in ran.err
    assert f"--cache-dir {folder}/shardcache" in ran.err


@needs_root
def test_file_that_another_user_planted_in_the_cache_folder_is_refused(tmp_path: Path) -> None:
    """The error names the file of somebody else's pins, though the folder is closed by now."""
    pins = tmp_path / "cache" / "pins"
    pins.parent.mkdir()
    pins.touch()
    os.chown(pins, 65534, 65534)
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", "--capacity", "1GB")
    assert ran.code == 1
    assert f"{pins} belongs to another user" in ran.err


@pytest.mark.parametrize("mode", [0o1777, 0o775])
def test_cache_folder_in_which_no_other_user_can_replace_files_is_used(
    mode: int, tmp_path: Path
) -> None:
    """The sticky bit keeps others from it; the user's own group has no other members."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with Daemon(tmp_path) as daemon:
        assert daemon.cache_dir == folder
        assert (folder / "format").exists()


def spawn_without_socket(args: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start `serve` without the option `--socket PATH`, which comes first."""
    command, option, _, *others = args
    assert command == "serve"
    assert option == "--socket"
    return Daemon.usual_spawn([command, *others], env, log)


@pytest.mark.slow
def test_temporary_daemon_stops_once_its_default_socket_is_deleted(tmp_path: Path) -> None:
    """As it does if an option names the socket: no client finds the daemon any more."""
    env = {"SHARDCACHE_SOCKET": str(tmp_path / "s.sock")}
    with Daemon(tmp_path, "--idle-exit-s", "3600", env=env, spawn=spawn_without_socket) as daemon:
        daemon.socket.unlink()
        assert daemon.wait() == 0
        assert "socket deleted" in daemon.log.read_text()


@pytest.mark.slow
def test_the_first_reader_does_not_wait_for_the_sdk(tmp_path: Path) -> None:
    """The modules that S3 needs are imported in the background, before a reader asks for them."""
    with Daemon(tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"}, spawn=spawn) as daemon:
        eventually(lambda: "shardcache.origin.s3.s3_sessions" in daemon.log.read_text())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--capacity", "lots"),
        ("--capacity", "120%"),
        ("--attempts", "0"),
        ("--part-size", "1kB"),
        ("--capacity", "50"),
        ("--capacity", "0%"),
    ],
)
def test_value_that_makes_no_sense_is_a_usage_error(flag: str, value: str, tmp_path: Path) -> None:
    """A bad value exits 2 and names its option."""
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", flag, value)
    assert ran.code == 2
    assert f"{flag}: " in ran.err


@pytest.mark.parametrize(
    ("config", "line", "meant"),
    [
        ("# sizes\ncapactiy = '1GB'", 2, "capacity"),
        ("part-size = '8MB'", 1, "part_size"),
        (
            "[[origin]]\nmatch = 's3://a/'\n\n[[origin]]\nmatch = 's3://b/'\nendpoint = 'http://c'",
            6,
            "endpoint_url",
        ),
        (
            "[[allow]]\nprefix = 's3://a/'\n[[allow]]\nprefix = 's3://b/'\nuser = ['root']",
            3,
            "users",
        ),
        ("[[allow]]\nprefx = 's3://a/'", 1, "prefix"),
    ],
)
def test_a_misspelt_option_is_shown_with_its_line_and_the_one_that_was_meant(
    config: str, line: int, meant: str, tmp_path: Path
) -> None:
    """At the top, in [[origin]] and in [[allow]]: file, line and the nearest name that there is."""
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", config=config)
    assert ran.code == 2, ran.err
    assert f"{tmp_path}/shardcache.toml, line {line}: " in ran.err, ran.err
    assert f"did you mean {meant!r}?" in ran.err


def test_a_value_is_blamed_on_where_it_was_given(tmp_path: Path) -> None:
    """The variable, or the line of the file; a limit reads as people write sizes."""
    ran = shardcache(
        "serve", "--cache-dir", tmp_path / "cache", env={"SHARDCACHE_MAX_BANDWIDTH": "1kB"}
    )
    assert ran.code == 2
    assert "$SHARDCACHE_MAX_BANDWIDTH: at least 65.5 kB" in ran.err
    ran = shardcache(
        "serve", "--cache-dir", tmp_path / "cache", env={"SHARDCACHE_ORIGIN": "s3://b/"}
    )
    assert ran.code == 2
    assert "$SHARDCACHE_ORIGIN: write the tables as a JSON list" in ran.err
    ran = refused(tmp_path, "--cache-dir", tmp_path / "cache", config="[origin]\nmatch = 's3://b/'")
    assert ran.code == 2
    assert "write [[origin]]" in ran.err


def test_odd_but_harmless_options_are_warnings(tmp_path: Path) -> None:
    """A capacity beyond the disk is one, and so is a variable that nothing reads."""
    with Daemon(
        tmp_path, "--part-size", "8MB", capacity="900PB", env={"SHARDCACHE_CAPCITY": "1TB"}
    ) as daemon:
        log = daemon.log.read_text()
    assert "capacity of 900.0 PB exceeds the size of its filesystem" in log
    assert "meant=SHARDCACHE_CAPACITY" in log
    assert "name=SHARDCACHE_CAPCITY" in log


def test_socket_and_cache_dir_in_use_are_refused(tmp_path: Path) -> None:
    """A second daemon exits 1, as each would evict what the other serves."""
    with Daemon(tmp_path) as daemon:
        for socket, folder in (
            (daemon.socket, tmp_path / "other"),
            (tmp_path / "other.sock", daemon.cache_dir),
        ):
            ran = shardcache("serve", "--socket", socket, "--cache-dir", folder)
            assert ran.code == 1
            assert str(daemon.socket if socket == daemon.socket else folder) in ran.err
        assert shardcache("status", socket=daemon.socket).code == 0


@pytest.fixture
def read_by_two(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two readers attached."""
    with Daemon(tmp_path) as daemon, ExitStack() as readers:
        for number in range(2):
            readers.enter_context(RawSession(daemon, f"job {number}"))
        yield daemon


ATTACHED = "2 readers attached; they will wait for the next one"


def test_stop_names_the_readers_that_are_attached(read_by_two: Daemon) -> None:
    """On stderr; without a terminal, nobody is asked."""
    ran = shardcache("stop", socket=read_by_two.socket)
    assert ran.code == 0
    assert ran.out == f"stopped: {read_by_two.socket}\n"
    assert ran.err == f"{read_by_two.socket}: {ATTACHED}\n"


def test_stop_of_an_idle_daemon_says_no_more(tmp_path: Path) -> None:
    """Nobody reads from it."""
    with Daemon(tmp_path) as daemon:
        ran = shardcache("stop", socket=daemon.socket)
    assert ran.code == 0
    assert ran.out == f"stopped: {daemon.socket}\n"
    assert ran.err == ""


@pytest.mark.parametrize(
    ("flags", "answer", "code", "stops"),
    [
        pytest.param((), b"n\n", 1, False, marks=pytest.mark.slow),
        ((), b"y\n", 0, True),
        pytest.param(("--yes",), b"", 0, True, marks=pytest.mark.slow),
        pytest.param(("--json",), b"", 0, True, marks=pytest.mark.slow),
    ],
)
def test_stop_asks_on_a_terminal(
    read_by_two: Daemon, flags: tuple[str, ...], answer: bytes, code: int, stops: bool
) -> None:
    """If readers are attached, and neither --yes nor --json was given."""
    with stop_on_terminal(read_by_two, *flags) as (process, terminal):
        os.write(terminal, answer)
        out, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == code, err
    assert ATTACHED in err.decode()
    assert (b"Stop it?" in err) is bool(answer)
    assert (str(read_by_two.socket) in out.decode()) is stops
    assert read_by_two.socket.exists() is not stops


@contextmanager
def stop_on_terminal(daemon: Daemon, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `stop` with a terminal as input; yield its process and the descriptor to type on."""
    ours, theirs = pty.openpty()
    try:
        command = [
            sys.executable,
            "-m",
            "shardcache",
            "stop",
            *flags,
            "--socket",
            str(daemon.socket),
        ]
        with subprocess.Popen(
            command,
            env=clean_environment({}),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            yield process, ours
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("end", first_quick([Daemon.kill, Daemon.stop]))
def test_daemon_that_ends_while_stop_asks_counts_as_stopped(
    read_by_two: Daemon, end: Callable[[Daemon], object]
) -> None:
    """A killed daemon leaves its socket and another removes it, and neither can be reached."""
    with stop_on_terminal(read_by_two) as (process, terminal):
        assert process.stderr is not None
        asked = b""
        while b"Stop it?" not in asked:
            piece = process.stderr.read1()
            assert piece, asked
            asked += piece
        end(read_by_two)
        os.write(terminal, b"y\n")
        out, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 0, err
    assert out.decode() == f"stopped: {read_by_two.socket}\n"


def test_daemon_whose_process_has_ended_counts_as_stopped(tmp_path: Path) -> None:
    """Another process may hold its socket open, so that it can still be connected to."""
    listen = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).listen()"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(GUARD_S)
        listener.bind(f"{tmp_path}/s")
        with subprocess.Popen(
            [sys.executable, "-c", listen, str(listener.fileno())], pass_fds=[listener.fileno()]
        ) as daemon:
            daemon.wait(GUARD_S)

        def answer_status() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as request:
                while request.readline() != b"\r\n":
                    pass
                status = json.dumps({"pid": daemon.pid, "jobs": []}).encode()
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(status), status)
                )

        answered = threads.submit(answer_status)
        ran = shardcache("stop", socket=tmp_path / "s")
        answered.result()
    assert ran.code == 0, ran.err
    assert ran.out == f"stopped: {tmp_path}/s\n"
