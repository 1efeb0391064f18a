"""Speaking to a daemon as another user, which takes root."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.programs.guard import GUARD_S

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")

# Whatever it imports comes first: another user may not be allowed to read this Python.
_BECOME = """
import encodings.idna, http.client, json, os, socket, sys
uid, gid, groups, task = json.load(sys.stdin)
os.setgroups(groups)
os.setgid(gid)
os.setuid(uid)
"""
_ASK = """
path, method, target, body = task
connection = http.client.HTTPConnection("shardcache", timeout=300)
connection.sock = socket.socket(socket.AF_UNIX)
try:
    connection.sock.connect(path)
except PermissionError:
    print(json.dumps(["refused", []]))
else:
    connection.request(method, target, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    print(json.dumps([answer.status, [json.loads(line) for line in answer.read().splitlines()]]))
"""
# What the command imports comes first, too.
_IMPORT = """
import contextlib, io, rich.console, rich.progress, rich.status, tomllib
from shardcache.cli.main import app
from shardcache.cli.doctor import runner
rich.console.Console(stderr=True).status("this imports the spinner and its text")
"""
_COMMAND = """
os.chdir("/")
with contextlib.redirect_stdout(io.StringIO()) as out:
    code = app(task, standalone_mode=False)
print(json.dumps([code, json.loads(out.getvalue())]))
"""
_LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind(task)
listener.listen()
print("listening", flush=True)
while True:
    with listener.accept()[0] as connection:
        print(json.dumps(connection.recv(65536).decode()), flush=True)
"""


@dataclass(frozen=True, slots=True)
class OtherUser:
    """A user by number, with a primary group and further ones."""

    uid: int
    gid: int = 65534
    groups: tuple[int, ...] = ()
    # Command that starts the user's process, such as one that enters a namespace.
    within: tuple[str, ...] = ()

    def ask(
        self, socket: Path, method: str, target: str, body: object = None
    ) -> tuple[int | str, list[Any]]:
        """Send one request; return its status, or "refused", and the lines of JSON that came."""
        status, lines = self._run(_ASK, [str(socket), method, target, body])
        return status, lines

    def may_read(self, path: Path) -> bool:
        assert path.exists()
        become: dict[str, Any] = {"user": self.uid, "group": self.gid, "extra_groups": self.groups}
        return subprocess.run(["test", "-r", path], check=False, **become).returncode == 0

    def doctor(self, *args: str | Path) -> tuple[int, Any]:
        """Run `shardcache doctor` without measurements; return exit code and printed JSON."""
        return self.command("doctor", "--quick", *args)

    def command(self, *args: str | Path) -> tuple[int, Any]:
        """Run `shardcache` with --json; return its exit code and the JSON that it prints."""
        code, report = self._run(_COMMAND, [*map(str, args), "--json"], before=_IMPORT)
        return code, report

    @contextmanager
    def listening(self, path: Path) -> Iterator[list[str]]:
        """Listen at a Unix socket; the list then has each connection's first message."""
        seen: list[str] = []
        command = [*self.within, sys.executable, "-I", "-c", _BECOME + _LISTEN]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as listener:
            assert listener.stdin is not None
            assert listener.stdout is not None
            listener.stdin.write(json.dumps([self.uid, self.gid, self.groups, str(path)]))
            listener.stdin.close()
            assert listener.stdout.readline() == "listening\n"
            try:
                yield seen
            finally:
                listener.kill()
            seen += map(json.loads, listener.stdout)

    def _run(self, script: str, task: object, *, before: str = "") -> Any:
        done = subprocess.run(
            [*self.within, sys.executable, "-I", "-c", before + _BECOME + script],
            input=json.dumps([self.uid, self.gid, self.groups, task]),
            capture_output=True,
            text=True,
            timeout=GUARD_S,
            check=True,
        )
        return json.loads(done.stdout)


@contextmanager
def open_folder() -> Iterator[Path]:
    """Lend a folder that every user may enter; pytest's are for their owner alone."""
    with tempfile.TemporaryDirectory(prefix="access-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
