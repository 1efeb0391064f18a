"""Commands without a daemon that answers."""

import socket
from pathlib import Path

import pytest

from support.programs.cli import shardcache

URL = "s3://bucket/a.tar"
COMMANDS = [("status",), ("top",), ("warm", URL), ("ls",), ("evict", URL), ("verify",), ("dashboard", "--no-open")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_socket_exits_3_with_the_command_to_start_one(command: tuple[str, ...], tmp_path: Path) -> None:
    """Each command that needs a daemon exits 3 and prints the command that starts one at that very socket."""
    path = tmp_path / "none.sock"
    ran = shardcache(*command, socket=path)
    assert (ran.code, ran.out) == (3, "")
    assert f"shardcache serve --socket {path} --cache-dir" in ran.err


def test_socket_of_a_killed_daemon_exits_3(tmp_path: Path) -> None:
    """A socket file that nobody listens at any more is no daemon either."""
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert shardcache("status", socket=path).code == 3


def test_json_error_is_an_object_on_stdout(tmp_path: Path) -> None:
    """With --json, a script finds the error as JSON where it reads the result."""
    path = tmp_path / "none.sock"
    ran = shardcache("status", "--json", socket=path)
    assert ran.code == 3
    assert (ran.json["error"]["code"], ran.json["error"]["url"]) == ("no_daemon", str(path))


def test_socket_from_the_environment(tmp_path: Path) -> None:
    """Without --socket, $SHARDCACHE_SOCKET says where the daemon is."""
    path = tmp_path / "from-env.sock"
    ran = shardcache("status", env={"SHARDCACHE_SOCKET": str(path)})
    assert ran.code == 3 and str(path) in ran.err
