"""This user's private daemons: whether this node needs one, its place, and its credentials.

If nobody has set up a daemon for the node, a reader starts a private daemon for its user. A private
daemon uses the credentials and the Python of the environment that started it. A place is the set of
files of one private daemon, in a folder that only this user may enter. The names of the files begin
with the environment's digest, a hash of credentials and Python. So a process with other credentials
or another Python finds no socket under its own digest, and gets another daemon. A process that does
not see the daemon's cache gets another daemon as well.

Secrets of AWS, Azure, Google and the Hub are left out of the hash: readers hand them over to the
daemon (see `shared.credentials`). The client and the command line import this module, so it uses
the standard library alone.
"""

import errno
import fcntl
import hmac
import json
import os
import re
import secrets
import shlex
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardcache.shared.credentials.handed_credentials import handed_labels
from shardcache.shared.credentials.store_variables import reaches_stores
from shardcache.shared.exceptions import DaemonError
from shardcache.shared.socket_paths import (
    CONFIG_ENV,
    DEFAULT_CONFIG,
    SOCKET_ENV,
    SYSTEM_SOCKET,
    may_exist,
    socket_path,
)
from shardcache.shared.unix_socket import MAX_SOCKET_BYTES, connected, peer_ids

_KEY_BYTES = 32  # length of the secret key of the hash
# Maximum number of places of one environment. It needs several if containers with this environment
# do not see each other's caches.
_MAX_PLACES = 16
_DIGEST_CHARS = 16  # length of an environment's digest
_SOCKET_NAME_BYTES = len("/.NN.sock") + _DIGEST_CHARS
_LOCK_POLL_S = 0.02
_CONNECT_S = 2.0
_GROUP_AND_OTHERS = 0o077  # all rights of users other than the owner


def node_has_daemon() -> bool:
    """Return True if somebody set up a daemon for this node, whether or not it runs.

    A daemon that listens at this user's own socket counts, too.
    """
    if os.environ.get(SOCKET_ENV) or os.environ.get(CONFIG_ENV):
        return True
    if may_exist(DEFAULT_CONFIG) or may_exist(SYSTEM_SOCKET.parent):
        return True
    # The error says that the socket's folder is another user's, whose daemon does not count.
    with suppress(DaemonError):
        return is_listening(socket_path())
    return False


def tool_socket(explicit: str | os.PathLike[str] | None = None, *, fetches: bool = False) -> Path:
    """Return the socket of the daemon to which a command of the command line connects.

    If nobody has set up a daemon for the node, it is the socket of a running private daemon: the
    one with the credentials of the command's environment. A command that fetches nothing needs no
    credentials, so if the user has only one private daemon, the command uses that one.

    Args:
        explicit: the socket that the user named; None if the user named none.
        fetches: True if the command makes the daemon use its credentials.
    """
    if explicit is not None or node_has_daemon() or not _sockets_folder().exists():
        return socket_path(explicit)
    place = PrivatePlace.find()
    sockets = place.running_sockets()
    if not sockets:
        return socket_path(explicit)
    if len(sockets) == 1 and not fetches:
        return sockets[0]
    return place.socket


class PrivatePlace:
    """The files of a private daemon with one environment's credentials and Python.

    Their names begin with the environment's digest. If daemons of one environment do not see each
    other's caches, as in different containers, a number follows the digest.

    Args:
        folder: the folder of the files.
        name: the name of the files, without their suffixes.

    Attributes:
        folder: the folder of all private daemons of this user; nobody else may enter it.
        socket: the socket at which the daemon listens.
        log: the file to which the daemon logs.
        lock: a file that is locked while the daemon starts.
        start_lock: a file that is locked by a process that starts any private daemon of this user.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.socket = folder / f"{name}.sock"
        self.log = folder / f"{name}.log"
        self.lock = folder / f"{name}.lock"
        self.start_lock = folder / "turn.lock"
        # A file with the path, device and inode of the daemon's cache folder, as JSON.
        self._cache_record = folder / f"{name}.cache"

    @classmethod
    def in_cache(cls, folder: Path, base: Path) -> "PrivatePlace":
        """Return the second place of a daemon, in its cache folder.

        A logout may remove the folder of the first place. The second place stays, and every process
        that sees the cache finds it.

        Args:
            folder: the daemon's cache folder.
            base: the folder of all private caches, with the key by which the names are hashed.
        """
        return cls(folder, environment_digest(base, _python()))

    @classmethod
    def find(cls) -> "PrivatePlace":
        """Return the place for this process's environment; its folder is created if it is missing.

        It is the place of a running daemon whose cache this process sees, or else a free place.
        Raises DaemonError if the folder could be another user's, or cannot be created, or if there
        are too many daemons.
        """
        folder = secured(_sockets_folder())
        digest = environment_digest(folder, _python())
        numbered = [f"{digest}.{number}" for number in range(1, _MAX_PLACES)]
        places = [cls(folder, name) for name in (digest, *numbered)]
        # All places are tried: a place in use may follow a free one, whose daemon has ended since.
        listening = [place for place in places if is_listening(place.socket)]
        for place in listening:
            if place.shows_cache():
                return place
        for place in places:
            if place not in listening:
                return place
        raise DaemonError(
            f"none of the {_MAX_PLACES} daemons in {folder} has a cache that this process can see",
            remedy="shardcache stop; or mount the same cache folder in all of your containers",
        )

    @property
    def is_usable(self) -> bool:
        """True if the path of the socket is short enough."""
        return len(os.fsencode(self.socket)) <= MAX_SOCKET_BYTES

    def link_to(self, other: "PrivatePlace") -> None:
        """Make this place's socket a link to another place's, so that its daemon is found here too.

        Raises DaemonError.
        """
        try:
            self.socket.unlink(missing_ok=True)
            self.socket.symlink_to(other.socket)
        except OSError as exn:
            raise _folder_error(self.folder, exn) from exn

    def record_cache(self, cache: Path) -> None:
        """Record the cache folder of the daemon that is about to start. Raises DaemonError."""
        try:
            status = cache.stat()
        except OSError as exn:  # for example, the folder was removed since it was chosen
            raise DaemonError(
                f"the cache folder {cache} cannot be used ({exn.strerror})",
                remedy="try again",
            ) from exn
        record = json.dumps([str(cache), status.st_dev, status.st_ino])
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(self._cache_record, flags, 0o600), "w") as file:
                file.write(record)
        except OSError as exn:
            raise _folder_error(self.folder, exn) from exn

    def shows_cache(self) -> bool:
        """Return True if this process sees the cache folder of the daemon last started here.

        In another mount namespace, its path may be missing or lead to another folder.
        """
        try:
            path, device, inode = json.loads(self._cache_record.read_text())
        except FileNotFoundError:  # daemons of earlier releases have no record
            return True
        except ValueError:  # the record is being written
            return False
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == (device, inode)

    def running_sockets(self) -> list[Path]:
        """Return the sockets at which private daemons listen in this place's folder."""
        return [path for path in sorted(self.folder.glob("*.sock")) if is_listening(path)]


def is_listening(path: Path) -> bool:
    """Return True if a process of this user accepts connections at the socket.

    A frozen daemon counts as listening: the kernel still accepts connections for it.
    """
    try:
        with connected(path, _CONNECT_S) as sock:
            _, uid, _ = peer_ids(sock)
            return uid == os.geteuid()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        # Any other error does not show that nobody listens. If it lasts, the caller gets it when it
        # connects.
        return True


def secured(folder: Path, denied: int = _GROUP_AND_OTHERS) -> Path:
    """Create a folder unless it exists, check that it is safe to use, and return it.

    Args:
        folder: path of the folder.
        denied: bits of a mode, for the rights that other users must not have on the folder.

    Raises DaemonError if the folder is a link, another user's, or open to others: in a parent
    folder such as /tmp, anyone could have created it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as exn:
        raise _folder_error(folder, exn) from exn
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise DaemonError(
            f"{folder} is a link or belongs to another user, who could pose as your daemon",
            remedy="remove it, or choose another place: export XDG_RUNTIME_DIR=…, a folder of mode "
            "0700 of your own",
        )
    if status.st_mode & denied:
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise DaemonError(
            f"other users have access to {folder} ({mode}), where they could pose as your daemon",
            remedy=f"chmod 700 {shlex.quote(str(folder))}",
        )
    return folder


def _folder_error(folder: Path, exn: OSError) -> DaemonError:
    """Return the error for a folder whose files cannot be read or written."""
    if is_file_limit(exn):
        return DaemonError(
            f"this process may write no files, such as one in {folder} ({exn.strerror})",
            remedy="ulimit -f unlimited; if that is refused, have the job's hard limit raised",
        )
    remedy = "export XDG_RUNTIME_DIR=…, a folder of mode 0700 that belongs to you"
    return DaemonError(f"the folder {folder} cannot be used ({exn.strerror})", remedy=remedy)


def is_file_limit(exn: BaseException | None) -> bool:
    """Return True for the error of a process whose limit of file sizes is too low (`ulimit -f`)."""
    return isinstance(exn, OSError) and exn.errno == errno.EFBIG


def environment_digest(folder: Path, python: str = "") -> str:
    """Return the hash of the credentials in this process's environment.

    The hash has a secret key, without which the name of a socket or a cache folder does not help to
    guess the credentials.

    Args:
        folder: a folder of this user's, in which the key is kept.
        python: identity of the daemon's Python, which is hashed as well; empty to leave it out.

    Raises DaemonError if the key can be neither read nor created, as on a full disk.
    """
    try:
        key = _key(folder)
    except OSError as exn:
        raise _folder_error(folder, exn) from exn
    names = {name for name in os.environ if _is_credential(name)}
    hashed: list[str] = []
    # Readers hand over the values of some variables to the daemon, so a daemon may serve several
    # values. Of these credentials, only a label is hashed, such as "keys of AWS".
    for label, variables in handed_labels(os.environ).items():
        names.difference_update(variables)
        hashed.append(label)
    hashed += [f"{name}={os.environ[name]}" for name in sorted(names)]
    if python:
        hashed.append(python)
    text = "\0".join(hashed)
    digest = hmac.new(key, text.encode(errors="surrogateescape"), "sha256").hexdigest()
    return digest[:_DIGEST_CHARS]


def _is_credential(variable: str) -> bool:
    """Return True if an environment variable may decide which credentials are used."""
    # The stores' clients also find credentials in files below the home folder.
    return variable == "HOME" or reaches_stores(variable)


def _python() -> str:
    """Return the identity of this process's Python environment, in which its daemon runs, too.

    It includes the folder's inode: an environment that was deleted and created again at the same
    path has another identity.
    """
    prefix = os.path.realpath(sys.prefix)
    try:
        return f"{prefix} {os.stat(prefix).st_ino}"  # noqa: PTH116
    except OSError:  # removed while this process runs
        return prefix


def is_environment_digest(name: str) -> bool:
    """Return True if a name has the form of a digest.

    Files in a cache folder whose names have another form are never touched.
    """
    return re.fullmatch(rf"[0-9a-f]{{{_DIGEST_CHARS}}}", name) is not None


def _key(folder: Path) -> bytes:
    """Return a folder's key, which is created if it is missing or cut short. Raises OSError."""
    path = folder / "key"
    if not _is_complete(path):
        with locked(folder):  # two processes must not use two keys
            if not _is_complete(path):
                _write_key(path)
    return path.read_bytes()


def _is_complete(path: Path) -> bool:
    """Return whether a file has a whole key; with a shorter one, the digests would hide nothing."""
    try:
        return path.stat().st_size >= _KEY_BYTES
    except FileNotFoundError:
        return False


def _write_key(path: Path) -> None:
    """Write another key to a file, which gets its name only once it is complete. Raises OSError."""
    fd, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            # Without this, the file may have its name but no key after a power failure.
            file.flush()
            os.fsync(fd)
        Path(draft).rename(path)
    except BaseException:
        Path(draft).unlink()
        raise


@contextmanager
def locked(path: Path, limit_s: float = 60.0, *, is_inherited: bool = False) -> Iterator[int]:
    """Hold the lock of a file, which is created, or of a folder; yield its descriptor.

    A folder must be locked only for moments, because it may be the folder of both sockets and
    caches.

    Args:
        path: the file or folder to lock.
        limit_s: maximum time to wait for the lock.
        is_inherited: False to release the lock after the block, even if another thread has forked a
            process that has the descriptor as well, such as a worker of a DataLoader. True to keep
            it until the last process with the descriptor closes it.

    Raises DaemonError if another process holds the lock for longer than `limit_s`, or the file
    cannot be created.
    """
    flags = os.O_DIRECTORY if path.is_dir() else os.O_CREAT | os.O_NOFOLLOW
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, 0o600)
    except OSError as exn:
        raise _folder_error(path.parent, exn) from exn
    try:
        deadline_s = time.monotonic() + limit_s
        while not try_lock(fd):
            if time.monotonic() > deadline_s:
                raise DaemonError(
                    f"another process has been starting a daemon for {limit_s:g} s",
                    url=str(path),
                    remedy=f"end the process that `fuser -v {shlex.quote(str(path))}` names",
                )
            time.sleep(_LOCK_POLL_S)
        try:
            yield fd
        finally:
            if not is_inherited:
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Lock an open file or folder; return False if another process holds its lock."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _sockets_folder() -> Path:
    """Return the folder of this user's sockets.

    All jobs of a user share the folder, so it is not in the temporary directory of one job, unless
    this process may not write to /tmp.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and _is_own(Path(runtime)):
        folder = Path(runtime) / "shardcache-private"
        if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES <= MAX_SOCKET_BYTES:
            return folder
    shared = Path("/tmp")  # anyone may write there: see `secured`
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"shardcache-private-{os.geteuid()}"


def _is_own(folder: Path) -> bool:
    """Return True for a folder of this user's that nobody else may enter."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & _GROUP_AND_OTHERS
