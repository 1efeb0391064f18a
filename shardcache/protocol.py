"""The protocol between daemon and client: messages, versions and socket path.

Control is JSON over a Unix socket; shard bytes never pass through it. A reader opens one WebSocket at `SESSION_PATH`;
its plan and its leases live exactly as long as that connection. Tools use the admin API over plain HTTP on the same
socket.

The messages of a session, in order (every request has an `id`, which its answer repeats):

    client  hello    {protocol, oldest_protocol, client_version, job, rank, world_size, worker, workers, pid,
                      loader?, batch_size?}
    daemon  welcome  {protocol, version, cache_dir}
    client  resolve  {id, urls}                          → manifest {id, shards: [[url, version, size, samples]…],
                                                           remembered}
    client  plan     {id, epoch, shards, order, reads}   → ok {id}
    client  extend   {id, shards, order}                 → ok {id}
    client  lease    {id, position, partial}             → leased {id, lease, url, version, path, index_path, …}
                                                           arriving {id, lease, url, version, path, ready_bytes, …}
    client  need     {of}                                (no answer)
    client  more     {id, lease, beyond}                 → arriving or leased, as above
    client  explain  {id, of}                            → waiting {id, of, reason}
    client  release  {lease, read?}                      (no answer)
    daemon  error    {id, error}                         instead of any answer

A plan's `order` indexes into its `shards`, in reading order: first the `reads` positions of this epoch, then those of
later epochs as far as they are determined. `extend` appends to both lists, so that a plan of any length can be sent in
pieces. A lease's `position` counts through the whole order.

A reader may have thousands of leases: on the shards it is reading, and on others that it requested ahead. Requesting a
lease does not protect a shard: until it is needed, a `leased` shard may be evicted in favour of a reader that has
nothing to read. `need` says that the reader has reached the shard of the request `of`, and has nothing to read until it
arrives. From then on, or from its grant if that comes later, the shard is in use and stays in place until `release`. A
reader that finds no file, because the shard was evicted before it was needed, releases the lease with `read` false and
requests it again.

With `partial`, a plain tar that is needed may be granted while it is `arriving`: the file has its final size, and its
first `ready_bytes` are valid, each part verified. `more` waits until there are more than `beyond` bytes, or the shard
is complete and indexed; then the answer is `leased`, with the same lease number. An error ends the lease.

A lease that is not granted yet is released by the id of its request, which then gets no answer. `need` and `release` of
a lease that has ended are ignored: an error may have crossed them on the wire.

Cached shards are scrubbed. When a shard that a reader has in use turns out to be damaged, the next `leased` or
`arriving` has a list `damaged` of errors, each naming a shard: samples read from it may be wrong.

`remembered` is the number of sample counts in the manifest that only this daemon knows; the others come from an index
file.

The workers of a data loader send its name and batch size in `hello`: the loader takes one batch from each worker in
turn, so a worker that waits for cache space keeps the others from releasing theirs.

A `waiting` has `done_bytes` and `total_bytes` only while the shard is being fetched.

Daemon and client may be different releases. `hello` names the newest and the oldest protocol version that the client
speaks, `welcome` the newest that both speak. Unknown fields are ignored, so a release may add fields under the same
version; so are unsolicited messages of the daemon. A request of unknown type gets an error, and the session continues.
An error also names the codes of its parent classes: a client that does not know its code uses the nearest parent.

A stopping daemon closes its sessions with WebSocket code 1001, and refuses new ones with HTTP status 503 and a
StoppingError. Granted shards may still be read; the client sends its plan to the next daemon.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from shardcache.errors import DaemonError, VersionMismatchError

PROTOCOL_VERSION = 3
OLDEST_PROTOCOL_VERSION = 3
SESSION_PATH = "/v1/session"
SOCKET_ENV = "SHARDCACHE_SOCKET"
SYSTEM_SOCKET = Path("/run/shardcache/shardcache.sock")

# A manifest of a million shards is at most about 200 MB of JSON; clients send their plans in pieces.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Spoken:
    """The range of protocol versions that one side speaks, inclusive."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"protocol {self.newest}" if self.oldest == self.newest else f"protocols {self.oldest} to {self.newest}"

    @classmethod
    def of(cls, newest: int, hello: Mapping[str, Any]) -> Spoken:
        """Return the versions in a `hello`; without `oldest_protocol`, only the newest."""
        oldest = hello.get("oldest_protocol")
        return cls(oldest if isinstance(oldest, int) else newest, newest)


SPOKEN = Spoken(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)


@dataclass(frozen=True, slots=True)
class Release:
    """A shardcache version and the protocol versions that it speaks."""

    version: str
    spoken: Spoken

    def __str__(self) -> str:
        return f"shardcache {self.version}, which speaks {self.spoken}"


def agree(*, daemon: Release, client: Release) -> int:
    """Return the newest protocol version that both sides speak.

    Raises VersionMismatchError if there is none; it names both releases and says which to upgrade.
    """
    newest = min(daemon.spoken.newest, client.spoken.newest)
    if newest >= max(daemon.spoken.oldest, client.spoken.oldest):
        return newest
    behind, ahead = ("in the training image", daemon) if client.spoken.newest == newest else ("on the node", client)
    raise VersionMismatchError(
        f"the daemon is {daemon}, the client {client}",
        remedy=f"install shardcache {ahead.version} {behind}, or any release that speaks {ahead.spoken}",
    )


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard in a manifest.

    Attributes:
        url: the original url, as in the samples' `__url__`.
        version: its version in the object store (ETag), or None if unknown before the fetch.
        size_bytes: its size in the object store, or None.
        samples: number of samples, or None until the shard has been indexed once.
    """

    url: str
    version: str | None = None
    size_bytes: int | None = None
    samples: int | None = None

    def to_json(self) -> list[Any]:
        """Return `[url, version, size_bytes, samples]`."""
        return [self.url, self.version, self.size_bytes, self.samples]

    @classmethod
    def from_json(cls, row: list[Any]) -> ShardRef:
        """Build from the output of `to_json`."""
        url, version, size_bytes, samples = row
        return cls(url, version, size_bytes, samples)


class Arriving(TypedDict):
    """A shard whose first `ready_bytes` can be read at `path`; its other bytes are not valid yet.

    If `path` has another `inode`, the download was restarted: do not read any bytes of that file.
    """

    type: str
    id: int
    lease: int
    url: str
    version: str
    path: str
    inode: int
    size_bytes: int
    ready_bytes: int


class Leased(TypedDict):
    """A cached shard that, once it is needed, stays in place until `release {lease}` or the end of the connection."""

    type: str
    id: int
    lease: int
    url: str
    version: str
    path: str
    index_path: str
    size_bytes: int
    samples: int


def socket_path(explicit: str | os.PathLike[str] | None = None, env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the daemon's socket for this node and user.

    In order of precedence: the explicit path; `$SHARDCACHE_SOCKET`; `/run/shardcache/shardcache.sock` if it exists or
    this user could create it; `$XDG_RUNTIME_DIR/shardcache/`; a folder of the user's own in the temporary directory.
    """
    if explicit is not None:
        return Path(explicit)
    if env.get(SOCKET_ENV):
        return Path(env[SOCKET_ENV])
    if _exists(SYSTEM_SOCKET) or _may_make(SYSTEM_SOCKET.parent):
        return SYSTEM_SOCKET
    runtime = env.get("XDG_RUNTIME_DIR")
    base = Path(runtime) / "shardcache" if runtime else _user_tmp()
    return base / SYSTEM_SOCKET.name


def from_here(url: str | os.PathLike[str]) -> str:
    """Make local paths and patterns, including `file:path`, absolute: the daemon has a different working directory.

    A folder gets a trailing slash, which stands for all shards below it. Other urls are returned unchanged.
    """
    text = os.fspath(url)
    if not text or "://" in text or text.startswith("pipe:"):
        return text
    path = text.removeprefix("file:")
    if not path.startswith("/"):
        folder = os.getcwd()  # noqa: PTH109  # the text may be a list of patterns, too long for a path
        while (head := path.partition("/"))[0] in (".", ".."):
            path, folder = head[2], os.path.dirname(folder) if head[0] == ".." else folder  # noqa: PTH120
        path = os.path.join(folder, path)  # noqa: PTH118
    return f"{path}/" if not path.endswith("/") and os.path.isdir(path) else path  # noqa: PTH112


def local_path(url: str) -> str | None:
    """Return the path of a `file://` url or an absolute path; None for any other url."""
    path = url.removeprefix("file://")
    return path if path.startswith("/") else None


def _exists(path: Path) -> bool:
    """Return True if the file exists, or its folder denies this user access: connecting then reports the reason."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _may_make(folder: Path) -> bool:
    nearest = folder if folder.exists() else folder.parent
    return os.access(nearest, os.W_OK | os.X_OK)


def _user_tmp() -> Path:
    folder = Path(tempfile.gettempdir()) / f"shardcache-{os.getuid()}"
    # Anyone can create a folder there; trust only one that this user owns.
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise DaemonError(f"{folder} belongs to another user", remedy="choose another path with --socket")
    return folder
