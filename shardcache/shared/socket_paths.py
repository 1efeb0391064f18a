"""Path of the daemon's socket, and the files that show that a daemon is set up for the node."""

import os
import tempfile
from pathlib import Path

from shardcache.shared.exceptions import DaemonError

SOCKET_ENV = "SHARDCACHE_SOCKET"
"""Environment variable with the path of the daemon's socket."""

CONFIG_ENV = "SHARDCACHE_CONFIG"
"""Environment variable with the path of the daemon's configuration file."""

DEFAULT_CONFIG = Path("/etc/shardcache/shardcache.toml")

SYSTEM_SOCKET = Path("/run/shardcache/shardcache.sock")
"""Socket of the daemon that serves all users of the node."""


def socket_path(explicit: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of the daemon's socket for this node and user.

    In order of precedence, it is:

    1. the explicit path;
    2. `$SHARDCACHE_SOCKET`;
    3. `/run/shardcache/shardcache.sock`, if it exists or this user could create it;
    4. a path in `$XDG_RUNTIME_DIR/shardcache/`, unless that folder is another user's;
    5. a path in this user's folder in the temporary directory.

    Raises DaemonError if the latter folder is another user's.
    """
    if explicit is not None:
        return Path(explicit)
    from_environment = os.environ.get(SOCKET_ENV)
    if from_environment:
        return Path(from_environment)
    if may_exist(SYSTEM_SOCKET) or _may_create_in(SYSTEM_SOCKET.parent):
        return SYSTEM_SOCKET
    runtime = runtime_folder()
    folder = _user_tmp() if runtime is None else runtime / "shardcache"
    return folder / SYSTEM_SOCKET.name


def runtime_folder() -> Path | None:
    """Return `$XDG_RUNTIME_DIR`; None if it is unset, or names another user's folder.

    After `su`, for example, the variable still names the previous user's folder.
    """
    text = os.environ.get("XDG_RUNTIME_DIR")
    if not text:
        return None
    folder = Path(text)
    try:
        is_own = folder.stat().st_uid == os.geteuid()
    except PermissionError:  # below another user's folder
        return None
    except OSError:
        return folder  # the use of the folder raises the error again
    if not is_own:
        return None
    return folder


def may_exist(path: Path) -> bool:
    """Return True if the file exists, or if its folder denies this user access.

    If access is denied, the use of the file raises the error again.
    """
    try:
        return path.exists()
    except PermissionError:
        return True


def _may_create_in(folder: Path) -> bool:
    """Return whether this user may create files in a folder, which need not exist yet."""
    nearest = folder if folder.exists() else folder.parent
    return os.access(nearest, os.W_OK | os.X_OK)


def _user_tmp() -> Path:
    """Return this user's folder in the temporary directory, which need not exist yet.

    Raises DaemonError if the folder belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"shardcache-{os.getuid()}"
    # Anyone can create a folder there, so only a folder that this user owns is trusted.
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise DaemonError(
            f"{folder} belongs to another user",
            remedy="choose another path with --socket",
        )
    return folder
