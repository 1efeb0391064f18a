"""nginx as a child process: found, checked, started, reloaded and ended. Blocking, Linux."""

import ctypes
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
from shardcache.shared.unix_socket import connected

_LUA = re.compile("(ndk|lua)_(http_)?module|lua_|resty")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_STOP_LIMIT_S = 15.0
_POLL_S = 0.02
_RELOAD_LIMIT_S = 60.0

Process = subprocess.Popen[bytes]


def clear_front(front: Path) -> None:
    """Remove the socket that a killed nginx left, once it has ended.

    Raises ConfigError if it does not.
    """
    deadline_s = time.monotonic() + _STOP_LIMIT_S
    while _is_served(front):
        if time.monotonic() > deadline_s:
            raise ConfigError(
                "another nginx already serves this node's daemon",
                url=str(front),
                remedy="stop that nginx first",
            )
        time.sleep(_POLL_S)
    front.unlink(missing_ok=True)


def _is_served(front: Path) -> bool:
    with suppress(OSError), connected(front, _POLL_S):
        return True
    return False


def find_program() -> str:
    """Return the path of nginx on this machine. Raises ConfigError."""
    folders = os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS))
    found = shutil.which("nginx", path=folders)
    if found is None:
        raise ConfigError(
            "nginx is not installed",
            remedy="apt-get install nginx-light libnginx-mod-http-lua, "
            "or your system's nginx ≥ 1.22 with its Lua module",
        )
    return found


def default_user(nginx: str) -> str:
    """Return the user of its workers if root starts it without naming one."""
    built = subprocess.run([nginx, "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"--user=(\S+)", built)
    return found[1] if found else "nobody"


def check_config(nginx: str, config: Path) -> None:
    """Raise ConfigError if nginx rejects a file of its configuration."""
    done = subprocess.run(
        [*_command(nginx, config), "-t", "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return
    lines = done.stderr.strip().splitlines()
    reason = lines[0] if lines else f"exit status {done.returncode}"
    remedy = "correct the options"
    if _LUA.search(reason):
        remedy = "apt-get install libnginx-mod-http-lua"
    raise ConfigError(
        f"nginx rejects its configuration: {reason}",
        url=str(config),
        remedy=remedy,
    )


def start(nginx: str, config: Path) -> Process:
    """Start nginx.

    Call it in the main thread of a process without others: the kernel ties nginx to the thread.
    """
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    # Workers of a killed nginx become this process's own children.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def end_with_parent() -> None:
        # SIGTERM, so that nginx ends its workers, too.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that call
            os._exit(1)

    return subprocess.Popen(
        _command(nginx, config),
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )


def wait_until_listening(process: Process, pid_file: Path) -> bool:
    """Return True as soon as nginx has bound its addresses, False if it has ended.

    nginx writes its pid file once it has bound them.
    """
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if pid_file.read_text().strip() == str(process.pid):
                return True
        time.sleep(_POLL_S)
    return False


def reload(process: Process, front: str, digest: str) -> None:
    """Have nginx use its changed configuration.

    Raises ConfigError unless it then serves the list with this digest.
    """
    process.send_signal(signal.SIGHUP)
    deadline_s = time.monotonic() + _RELOAD_LIMIT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError):
            if digest in answer_of(front):
                return
        time.sleep(_POLL_S)
    raise ConfigError("nginx did not load its new configuration", remedy="see nginx's messages")


def end(process: Process) -> int:
    """Stop nginx, and kill the workers that it left if it was killed; return its exit status."""
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    status = process.wait()
    left = _children()
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        left = _children()
    return status


def _children() -> list[int]:
    """Return the ids of this thread's child processes."""
    children = Path(f"/proc/self/task/{get_native_id()}/children")
    return [int(pid) for pid in children.read_text().split()]


def _command(nginx: str, config: Path) -> list[str | Path]:
    # Without `-e`, nginx begins with a log in a folder of root's.
    return [nginx, "-e", "stderr", "-c", config]
