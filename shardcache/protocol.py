"""What daemon and client say to each other, and where they meet.

Control is JSON over a Unix socket; shard bytes never pass through it. A reading process opens one WebSocket at
`SESSION_PATH`: its plan and its leases live exactly as long as that connection. Tools use the admin API over
plain HTTP on the same socket.

A session, in order (every request has an `id`, its answer carries the same one):

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
    daemon  error    {id, error}                         in place of any answer

A plan's `order` indexes into its `shards`, in reading order: first the `reads` positions of this epoch, then those of
later ones as far as they are determined. `extend` adds to the end of both lists, so that a plan of any length goes in
pieces. A lease's `position` counts through the whole order.

A reader may have thousands of leases: several shards in its hands, others that it asks for ahead of its need. To ask
is not to need: a shard that is `leased` may still lose its place to a reader that has nothing to read. `need` says that
the reader has come to the shard which the request `of` asked for, and has nothing to read until it is there. From then
on, or from its grant if that comes later, the shard is in its hands and stays in place until `release`. Who finds no
file, because it went before it was needed, releases it with `read` false and asks again.

With `partial`, a plain tar that is needed may be granted while it is `arriving`: the file has its final size, and its
first `ready_bytes` are there, checked each part by itself. `more` waits until more than `beyond` bytes are, or the
shard is whole and indexed, and then `leased` under the same number; an error ends the lease.

A lease that is not granted yet is released by the id of the request for it, which then gets no answer. Of one that is
over already, `need` and `release` say nothing: an error may have crossed them on the way.

What is published is read again now and then. When a shard that a reader has in hand turns out to be damaged, the next
`leased` or `arriving` has a list `damaged` of errors, each naming a shard: what was read of it may be wrong.

Of a manifest's sample counts, `remembered` are known to this daemon alone; the others stand in an index file.

The workers of a data loader name it in `hello`, and the size of its batches: the loader takes one from each in turn,
so that one that waits for room keeps the others from giving theirs back.

A `waiting` has `done_bytes` and `total_bytes` only while the shard is being fetched.

Daemon and client may be of different releases. `hello` names the newest and the oldest version of the protocol that the
client speaks, `welcome` the newest that both do. Fields that are not known are ignored, so a release may add some under
the same version, and so are messages of the daemon that are no answer; a request of an unknown type gets an error, and
the session goes on. An error names the codes of its parents, too: who does not know its own takes it for one of those.

A daemon that stops ends its sessions with the WebSocket code 1001, and refuses new ones with HTTP status 503 and a
StoppingError; what was granted may be read on, and the next daemon is told the plan again.
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

# A manifest of a million shards is some 200 MB of JSON at the very worst; what a client sends comes in pieces.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Spoken:
    """The versions of the protocol that one side speaks, both ends included."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"protocol {self.newest}" if self.oldest == self.newest else f"protocols {self.oldest} to {self.newest}"

    @classmethod
    def of(cls, newest: int, hello: Mapping[str, Any]) -> Spoken:
        """Return what a `hello` says; one that names a single version speaks just that."""
        oldest = hello.get("oldest_protocol")
        return cls(oldest if isinstance(oldest, int) else newest, newest)


SPOKEN = Spoken(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION)


@dataclass(frozen=True, slots=True)
class Release:
    """One side, as it is known by: a version of shardcache, and what that speaks."""

    version: str
    spoken: Spoken

    def __str__(self) -> str:
        return f"shardcache {self.version}, which speaks {self.spoken}"


def agree(*, daemon: Release, client: Release) -> int:
    """Return the newest version of the protocol that both sides speak.

    Raises VersionMismatchError, which names both and says which of them is to be upgraded, where there is none.
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
    """One shard as a manifest knows it.

    Attributes:
        url: the original url, as samples will carry it in `__url__`.
        version: the store's version (ETag), or None where it is not known before the fetch.
        size_bytes: size in the store, or None.
        samples: number of samples, or None until the shard was indexed once.
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
        """Build from what `to_json` gave."""
        url, version, size_bytes, samples = row
        return cls(url, version, size_bytes, samples)


class Arriving(TypedDict):
    """A shard whose first `ready_bytes` can be read at `path`; its other bytes there mean nothing yet.

    Another `inode` is there once this download was given up and begun anew: none of its bytes are meant.
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
    """A shard that, once it is needed, stays in place until `release {lease}` or the end of the connection."""

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
    """Return where daemon and client of this node and user meet.

    In order: the explicit path; `$SHARDCACHE_SOCKET`; `/run/shardcache/shardcache.sock` where it exists or could
    be made by this user; `$XDG_RUNTIME_DIR/shardcache/`; a folder of the user's own in the temporary directory.
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
    """Return local paths and patterns, `file:path` included, as absolute ones: the daemon has another working folder.

    A folder gets a slash at its end, for all shards below it. Urls are returned as they are.
    """
    text = os.fspath(url)
    if not text or "://" in text or text.startswith("pipe:"):
        return text
    path = text.removeprefix("file:")
    if not path.startswith("/"):
        folder = os.getcwd()  # noqa: PTH109  # a path as long as a list of patterns
        while (head := path.partition("/"))[0] in (".", ".."):
            path, folder = head[2], os.path.dirname(folder) if head[0] == ".." else folder  # noqa: PTH120
        path = os.path.join(folder, path)  # noqa: PTH118
    return f"{path}/" if not path.endswith("/") and os.path.isdir(path) else path  # noqa: PTH112


def local_path(url: str) -> str | None:
    """Return the path of a `file://` url or an absolute path; None for any other url."""
    path = url.removeprefix("file://")
    return path if path.startswith("/") else None


def _exists(path: Path) -> bool:
    """Tell whether the file exists; True, too, where its folder is closed to this user: connecting names the reason."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _may_make(folder: Path) -> bool:
    nearest = folder if folder.exists() else folder.parent
    return os.access(nearest, os.W_OK | os.X_OK)


def _user_tmp() -> Path:
    folder = Path(tempfile.gettempdir()) / f"shardcache-{os.getuid()}"
    # Anyone may make a folder there; only one of the user's own leads to the user's own daemon.
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise DaemonError(f"{folder} belongs to another user", remedy="choose another place with --socket")
    return folder
