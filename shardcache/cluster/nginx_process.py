"""nginx as a child process, ended with all its workers when this process ends, however it ends. Blocking, Linux."""

from __future__ import annotations

import ctypes
import http.client
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from threading import get_native_id

from shardcache.cluster.nginx_probe import answer_of
from shardcache.errors import ConfigError

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SYSTEM_FOLDERS = ("usr/local/sbin", "usr/sbin", "sbin")
_STOP_LIMIT_S = 15.0
_POLL_S = 0.02
_RELOAD_LIMIT_S = 20.0

Process = subprocess.Popen[bytes]


def program() -> str:
    """Return the path of nginx on this machine. Raises ConfigError."""
    if (found := shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS)))) is None:
        raise ConfigError("nginx is not installed", remedy="apt-get install nginx-light, or your system's nginx ≥ 1.22")
    return found


def default_user(nginx: str) -> str:
    """Return the user of its workers if root starts it without naming one."""
    built = subprocess.run([nginx, "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"--user=(\S+)", built)
    return found[1] if found else "nobody"


def check(nginx: str, config: Path) -> None:
    """Raise ConfigError if nginx rejects a file of its configuration."""
    done = subprocess.run([*_command(nginx, config), "-t", "-q"], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit status {done.returncode}"
        raise ConfigError(f"nginx rejects its configuration: {reason}", url=str(config), remedy="correct the options")


def start(nginx: str, config: Path) -> Process:
    """Start nginx. Call it in the main thread of a process without others: the kernel ties nginx to the thread."""
    libc, parent = ctypes.CDLL(None), os.getpid()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # workers of a killed nginx become this process's own children

    def end_with_parent() -> None:
        # SIGTERM, so that nginx ends its workers, too.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that call
            os._exit(1)

    return subprocess.Popen(_command(nginx, config), stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)


def wait_until_listening(process: Process, pid_file: Path) -> bool:
    """Return True as soon as nginx has bound its addresses, which it tells by its pid file; False if it has ended."""
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if pid_file.read_text().strip() == str(process.pid):
                return True
        time.sleep(_POLL_S)
    return False


def reload(process: Process, front: str, digest: str) -> None:
    """Have nginx use its changed configuration. Raises ConfigError unless it then serves the list with this digest."""
    process.send_signal(signal.SIGHUP)
    deadline_s = time.monotonic() + _RELOAD_LIMIT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError, http.client.HTTPException):
            if digest in answer_of(front):
                return
        time.sleep(_POLL_S)
    raise ConfigError("nginx did not take its new configuration", remedy="see its messages")


def end(process: Process) -> int:
    """Stop nginx, and kill the workers that it left if it was killed; return its exit status."""
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    status = process.wait()
    while left := Path(f"/proc/self/task/{get_native_id()}/children").read_text().split():
        for pid in map(int, left):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return status


def _command(nginx: str, config: Path) -> list[str | Path]:
    return [nginx, "-e", "stderr", "-c", config]  # else it begins with a log in a folder of root's
