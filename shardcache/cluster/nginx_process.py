"""nginx as a child process: functions that find, check, start, reload and end it.

`node_tier` calls these functions, which block, and need Linux. The front is the Unix socket at
which nginx serves the daemon of its own node. The argument `nginx` is the path of the program.
"""

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

from shardcache.cluster.nginx_probe import describe_nginx
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.unix_socket import connected

# Matches words in nginx's message if its Lua module is missing.
_LUA = re.compile("(ndk|lua)_(http_)?module|lua_|resty")
# Operations of prctl(2), from <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # some users' PATH lacks these
_STOP_LIMIT_S = 15.0
_RELOAD_LIMIT_S = 60.0
_POLL_S = 0.02
_CONNECT_LIMIT_S = 0.02  # short, as the socket is local

Process = subprocess.Popen[bytes]


def clear_front(front: Path) -> None:
    """Remove the socket `front` that a killed nginx has left, once its workers have ended.

    Raises ConfigError if a program still listens there after `_STOP_LIMIT_S`.
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
    """Return True if a program listens at the socket `front`."""
    with suppress(OSError), connected(front, _CONNECT_LIMIT_S):
        return True
    return False


def find_program() -> str:
    """Return the path of nginx on this machine. Raises ConfigError."""
    folders = os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS))
    program = shutil.which("nginx", path=folders)
    if program is None:
        raise ConfigError(
            "nginx is not installed",
            remedy="apt-get install nginx-light libnginx-mod-http-lua, "
            "or your system's nginx ≥ 1.22 with its Lua module",
        )
    return program


def default_user(nginx: str) -> str:
    """Return the user of nginx's workers if root starts nginx without naming a user."""
    # With `-V`, nginx prints the arguments with which it was built.
    result = subprocess.run([nginx, "-V"], capture_output=True, text=True, check=False)
    built_in = re.search(r"--user=(\S+)", result.stderr)
    return built_in[1] if built_in else "nobody"


def check_config(nginx: str, config: Path) -> None:
    """Raise ConfigError if nginx rejects its configuration file `config`."""
    result = subprocess.run(
        [*_command(nginx, config), "-t", "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return
    lines = result.stderr.strip().splitlines()
    reason = lines[0] if lines else f"exit status {result.returncode}"
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

    Call this in the main thread of a process that has no other threads: nginx ends when the calling
    thread ends.
    """
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    # If nginx is killed, its workers become children of this process, so that `end` finds them.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def end_with_parent() -> None:
        # SIGTERM is used rather than SIGKILL, so that nginx ends its workers, too.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # If the parent died before the call above, no signal comes.
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        _command(nginx, config),
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_parent,
    )


def wait_until_listening(process: Process, pid_file: Path) -> bool:
    """Return True as soon as nginx has bound its addresses, False if nginx has ended.

    nginx writes its pid file after it has bound its addresses.
    """
    while process.poll() is None:
        with suppress(FileNotFoundError):
            if pid_file.read_text().strip() == str(process.pid):
                return True
        time.sleep(_POLL_S)
    return False


def reload(process: Process, front: str, digest: str) -> None:
    """Let nginx use its changed configuration; wait until its answers have the new digest.

    Args:
        process: nginx.
        front: path of the socket at which nginx serves this node.
        digest: `Tier.digest` of the new configuration.

    Raises ConfigError if nginx does not use the new configuration in time.
    """
    process.send_signal(signal.SIGHUP)
    deadline_s = time.monotonic() + _RELOAD_LIMIT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError):
            if digest in describe_nginx(front):
                return
        time.sleep(_POLL_S)
    raise ConfigError("nginx did not load its new configuration", remedy="see nginx's messages")


def end(process: Process) -> int:
    """Stop nginx, or kill it and its workers if it does not stop; return its exit status."""
    process.terminate()
    try:
        process.wait(_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    status = process.wait()
    # The workers of a killed nginx are children of this process now (see `start`). More of them may
    # become children while the first ones are being killed, hence the loop.
    while orphans := _children():
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return status


def _children() -> list[int]:
    """Return the ids of this thread's child processes."""
    children = Path(f"/proc/self/task/{get_native_id()}/children")
    return [int(pid) for pid in children.read_text().split()]


def _command(nginx: str, config: Path) -> list[str | Path]:
    """Return the command that runs nginx with a configuration file, and logs to standard error."""
    # Without `-e`, nginx would first open a log in a folder that only root may write to.
    return [nginx, "-e", "stderr", "-c", config]
