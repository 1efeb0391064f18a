"""Any file through the cache: `cached_paths` and `open_cached`, for libraries that read files themselves."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Lock

from shardcache.errors import CacheDirError, CorruptShardError, ShardChangedError
from shardcache.protocol import ShardRef, Wanted, from_here, patterns_from_here
from shardcache_client import files
from shardcache_client.arguments import DAEMONS, JOB, OTHER_WORDS, PATH, SECONDS, URLS, checked
from shardcache_client.daemon.choice import DaemonChoice, Patience, Which
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.lease import Grant, LeaseRequest
from shardcache_client.daemon.session import Session, resolve
from shardcache_client.order.manifest import Manifest, Plan
from shardcache_client.ranks.environment import job_name

# A file granted ahead may be evicted before it is opened, but hardly again.
_TRIES = 5

_CHOICE = {"job": JOB.or_none(), "socket": PATH.or_none(), "daemon": DAEMONS, "timeout_s": SECONDS}


class CachedFile:
    """A file of a session's plan, open for reading, which stays cached until `close`. May be used by several threads.

    With `partial`, it is read as it arrives: the bytes that are needed are fetched first. Every method but `close`
    raises what `Session.wait` raises; CacheDirError if this process cannot read the cache folder; ShardChangedError if
    the object was replaced after some of its bytes were read.
    """

    def __init__(self, session: Session, position: int, *, partial: bool = False, named: bool = False) -> None:
        self._session, self._position, self._partial = session, position, partial
        self._named = named
        self._lease: LeaseRequest | None = None
        self._grant: Grant | None = None  # that of the open file
        self._fd = -1
        self._ready = (0, 0)  # start and end of the bytes that arrived last on request
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"CachedFile(position={self._position}, {self._grant})"

    def whole(self) -> Path:
        """Wait for the whole file, and return its path; with `named`, one that ends with the object's own name."""
        with self._lock:
            grant = self._held(0, None)
            # A daemon of an earlier release gives no name.
            return Path(str(grant.get("named_path", grant["path"])))

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`, fewer at the end of the file, as soon as they have arrived."""
        with self._lock:
            self._held(start, max(start + 1, stop))
            return os.pread(self._fd, stop - start, start)

    def close(self) -> None:
        """Close the file and release the lease."""
        if self._fd >= 0:
            os.close(self._fd)
        if self._lease is not None:
            self._session.release(self._lease)
        self._fd, self._lease = -1, None

    def _held(self, start: int, stop: int | None) -> Grant:
        """Have the file open, with the bytes from `start` to `stop` in it, or all; return its grant."""
        if self._grant is not None and self._has(self._grant, start, stop):
            return self._grant
        for tries_left in reversed(range(_TRIES)):
            grant = self._granted(start, stop)
            try:
                self._open(grant)
            except (CacheDirError, CorruptShardError) as exn:
                if not tries_left:
                    raise
                assert self._lease is not None
                if grant["type"] == "leased":
                    self._session.release(self._lease, read=False, damage=files.damage_of(exn))
                    self._lease = None
                else:  # published or given up since: the daemon knows which
                    self._session.more(self._lease, grant["size_bytes"])
            else:
                break
        return grant

    def _has(self, grant: Grant, start: int, stop: int | None) -> bool:
        if grant["type"] == "leased":
            return True
        spans = ((0, grant["ready_bytes"]), self._ready)  # type: ignore[typeddict-item]
        return stop is not None and any(
            first <= start and min(stop, grant["size_bytes"]) <= end for first, end in spans
        )

    def _granted(self, start: int, stop: int | None) -> Grant:
        """Wait for a grant with the bytes in it."""
        first = None if stop is None or not self._partial else (start, stop)
        while True:
            if self._lease is None:
                self._lease = self._session.lease(self._position, partial=self._partial, first=first, named=self._named)
                self._session.extend()
            self._lease.first, is_new = first, self._lease.grant is None
            found: Grant | None = self._session.wait(self._lease)
            if is_new and first is not None:
                self._ready = first
            if found is not None and not self._has(found, start, stop):
                beyond = found["size_bytes"] if stop is None else stop - 1
                found = self._session.more(self._lease, beyond, None if stop is None else start)
                self._ready = first or (0, 0)
            if found is not None:  # else the connection was lost
                return found

    def _open(self, grant: Grant) -> None:
        path, version = Path(grant["path"]), grant["version"]
        if self._partial and self._grant is not None and self._grant["version"] != version:
            raise ShardChangedError("the file was replaced in the object store while being read", url=grant["url"])
        inode = grant.get("inode")  # of an arriving file
        try:
            fd = files.open_file(path, grant["size_bytes"], inode)
        except CorruptShardError as exn:
            raise CorruptShardError(exn.message, url=grant["url"]) from exn
        except OSError as exn:
            raise files.unreadable(exn, path, grant["url"]) from exn
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._grant = fd, grant


@contextmanager
def session_of(
    choice: DaemonChoice, reader: ReaderIdentity, manifest: Manifest, wanted: Wanted, patience: Patience
) -> Iterator[Session]:
    """Provide a session with a plan of all that a manifest lists."""
    with closing(Session(choice, reader, patience)) as session:
        session.declare(Plan.of(manifest, 0, range(len(manifest)), wanted=wanted))
        yield session


@checked(OTHER_WORDS, urls=URLS, **_CHOICE)
@contextmanager
def cached_paths(
    urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    job: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    daemon: Which = "auto",
    timeout_s: float = 300.0,
) -> Iterator[list[str]]:
    """Fetch files and hold them in the cache until the `with` block ends; yields their paths, in the order of `urls`.

    For libraries that read files themselves. The block begins once every file is on local disk and verified:

        with cached_paths("s3://bucket/llama/model-{1..4}.safetensors") as paths:
            weights = [safetensors.torch.load_file(path) for path in paths]

    A path ends with the object's own name, that of an inflated shard with `.tar`. The files are read-only. Other
    processes of the node may read them, too, as long as this one is in the block: the files stay cached, also across a
    restart of the daemon, and are released when the block or the process ends. All of them must fit into the cache at
    the same time; one file descriptor is open per file.

    Shards, which are files with a name like `.tar` or `.tar.gz`, are checked to be whole tars, and inflated. A prefix
    stands for the shards below it, or if there are none for all files.

    Args:
        urls: as for `ShardDataset`, but of any files.
        job: name of this job in `shardcache status`. Default: as for `ShardDataset`.
        socket, daemon: as for `ShardDataset`.
        timeout_s: how long to wait for a file of which nothing arrives, or for a lost daemon to come back.

    Raises:
        NoDaemonError, DaemonError, VersionMismatchError: the daemon cannot be used.
        NotFoundError, AccessDeniedError, NotAllowedError, OriginError: `urls` cannot be resolved, or a file cannot be
            fetched.
        ShardError: a shard is damaged, or not a tar.
        CapacityError: the files do not fit into the cache, in addition to those that other jobs hold.
        ShardTimeoutError: a file did not arrive in time.
        CacheDirError: this process cannot read the cache folder.
    """
    choice, reader = DaemonChoice.of(socket, daemon), ReaderIdentity(job or job_name())
    manifest = resolve(choice, reader, patterns_from_here(urls), timeout_s, "either")
    with ExitStack() as held:
        session = held.enter_context(session_of(choice, reader, manifest, "either", Patience(timeout_s)))
        cached = []
        for number in range(len(manifest)):
            file = CachedFile(session, number, named=True)
            cached.append(held.enter_context(closing(file)))
        yield [str(each.whole()) for each in cached]


@checked(OTHER_WORDS, url=PATH, **_CHOICE)
def open_cached(
    url: str | os.PathLike[str],
    *,
    job: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    daemon: Which = "auto",
    timeout_s: float = 300.0,
) -> io.BufferedReader:
    """Fetch any file, whatever it holds, and open it for reading; it stays cached until it is closed.

        with open_cached("s3://bucket/model.pt") as file:
            weights = torch.load(file.name, mmap=True, weights_only=True)

    Its bytes are the object's own. `name` is its path, which other processes may read, too, while it is open.
    Arguments and errors are those of `cached_paths`.
    """
    choice, reader = DaemonChoice.of(socket, daemon), ReaderIdentity(job or job_name())
    with ExitStack() as held:
        one = Manifest.of([ShardRef(from_here(url))])
        session = held.enter_context(session_of(choice, reader, one, "files", Patience(timeout_s)))
        path = held.enter_context(closing(CachedFile(session, 0, named=True))).whole()
        return io.BufferedReader(_Held(path, held))


class _Held(io.FileIO):
    """A file, and what holds it in the cache until it is closed."""

    def __init__(self, path: Path, held: ExitStack) -> None:
        self._held = ExitStack()
        super().__init__(str(path))
        self._held = held.pop_all()

    def close(self) -> None:
        super().close()
        self._held.close()
